// What so many devices can do: T = S*(n b) (tau(b) + all-reduce), least over the examples b on each device.
"use strict";

(() => {
  const form = document.getElementById("calculator");
  if (!form) return;
  form.hidden = false;
  const curve = JSON.parse(form.querySelector("script").textContent);
  const sizes = curve.batch_size;
  const largest = sizes[sizes.length - 1];

  // By straight lines in the logarithms; beyond the ends, as at the end.
  function at(values, size) {
    const next = sizes.findIndex((one) => one >= size);
    if (next <= 0) return values[next < 0 ? values.length - 1 : 0];
    const share = Math.log(size / sizes[next - 1]) / Math.log(sizes[next] / sizes[next - 1]);
    return values[next - 1] * (values[next] / values[next - 1]) ** share;
  }

  function best(devices, memory, sync) {
    let found = null;
    for (let share = 0; share <= 1; share += 1 / 400) {
      const whole = sizes[0] * (largest / sizes[0]) ** share;
      const each = Math.round(whole / devices);
      if (each < 1 || each > memory || each * devices > largest || each * devices < sizes[0]) continue;
      const steps = at(curve.steps, each * devices);
      const seconds = steps * (at(curve.seconds_per_step, each) + (devices > 1 ? sync : 0));
      if (!found || seconds < found.seconds) found = { devices, each, batch: each * devices, steps, seconds };
    }
    return found;
  }

  function duration(seconds) {
    const [scale, unit] = seconds < 1 ? [1e-3, "ms"] : seconds < 120 ? [1, "s"] : seconds < 7200 ? [60, "min"] : [3600, "h"];
    return `${Number((seconds / scale).toPrecision(3))} ${unit}`;
  }

  function show() {
    const value = (name) => Number(form.elements[name].value);
    const devices = Math.round(value("devices"));
    const memory = value("memory") || Infinity;
    const sync = value("sync") / 1000;
    const output = form.nextElementSibling;
    const one = best(1, memory, 0);
    if (!(devices >= 1 && devices <= 100000 && sync >= 0) || !one) {
      output.textContent = "Give a number of devices from 1 on, and a memory that takes an example.";
      return;
    }
    const all = best(devices, memory, sync);
    if (!all) {
      output.textContent = `${devices} devices: more than the curve's largest batch size, ${largest}, has examples for.`;
      return;
    }
    const gain = one.seconds / all.seconds;
    const lr = Number(at(curve.lr, all.batch).toPrecision(3));
    const pays = gain <= 1 && devices > 1 ? "no faster than one device" : `${Number(gain.toPrecision(3))} times as fast as one`;
    output.textContent =
      `B = ${all.batch} (${all.each} on each), lr = ${lr}: ${Math.round(all.steps)} steps, ${duration(all.seconds)}; ` +
      `${pays}, efficiency ${Math.round((100 * gain) / devices)}%, ${duration(devices * all.seconds)} of device time`;
  }

  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
})();
