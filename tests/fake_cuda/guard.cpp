// What torch's CPU build lacks to compute on fake tensors of device cuda: a device guard that does nothing, hooks that
// say that there is one device with cuDNN, so that the choice of back ends in C++ is a GPU's, and the answer "cuda" to
// the autograd engine's question which accelerator there is. Load it before torch (LD_PRELOAD): library.py builds it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <optional>

using namespace c10;

struct FakeGuard final : public impl::DeviceGuardImplInterface {
  static Device first() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, first()); }

  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return first(); }
  Device getDevice() const override { return first(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(); }
  Stream exchangeStream(Stream) const override { return stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
static impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new FakeGuard());

struct CUDAHooks : public at::CUDAHooksInterface {  // the registry's macro wants this name
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
  long versionCuDNNFrontend() const override { return 11200; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }  // CUDNN_BN_MIN_EPSILON since cuDNN 7.5
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(DeviceIndex) const override {}
  bool isPinnedPtr(const void*) const override { return false; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

namespace at::accelerator {
// In torch's CPU build the answer is "none" at compile time: as it is loaded first, this one stands in its place.
__attribute__((visibility("default"))) std::optional<DeviceType> getAccelerator(bool) { return DeviceType::CUDA; }
}  // namespace at::accelerator
