"""Hugging Face's Trainer, whose batch size and learning rate a study chooses."""

import torch
from projects.own_loop.digits import TRAIN, VAL, make_model
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

from bstune.integrations.huggingface import TrialCallback, last_checkpoint


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_model()

    def forward(self, pixels, labels):
        logits = self.net(pixels)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def rows(images, labels):
    return [{"pixels": image, "labels": label} for image, label in zip(images, labels, strict=True)]


def train(study, every=5, trainer_class=Trainer):
    for trial in study:
        torch.manual_seed(trial.seed)
        arguments = TrainingArguments(
            output_dir=str(trial.save_to),
            per_device_train_batch_size=trial.batch_size,
            learning_rate=trial.lr,
            seed=trial.seed,
            max_steps=trial.max_steps,
            lr_scheduler_type="constant",
            dataloader_drop_last=True,
            optim="sgd",
            max_grad_norm=0.0,
            eval_strategy="steps",
            eval_steps=every,
            eval_on_start=True,
            per_device_eval_batch_size=300,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = trainer_class(
            Classifier(),
            arguments,
            train_dataset=rows(*TRAIN),
            eval_dataset=rows(*VAL),
            callbacks=[TrialCallback(trial)],
        )
        trainer.train(resume_from_checkpoint=last_checkpoint(trial))
