"""The same digits with a one-cycle policy of 500 steps, as many as its author trained for."""

import one_cycle
import torch


class Net(one_cycle.Net):
    def configure_optimizers(self):
        lr = self.hparams.lr
        optimizer = torch.optim.SGD(self.parameters(), lr=lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=500)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]
