"""Lightning with ISDA: two epochs on digits."""

import logging
import tempfile
import warnings

import lightning as L
import torch
from digits import create_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

import isda
from isda.integrations.lightning import ISDACallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.criterion = ISDACallback(isda.attach(self.model, lambda_0=0.5))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, target = batch
        loss = self.criterion(self.model(images), target)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"]
        print(f"epoch {self.current_epoch + 1}: loss {loss:.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    torch.manual_seed(0)
    module = Classifier()
    loader = DataLoader(create_digits(), batch_size=32, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=2,
            accelerator="cpu",
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[module.criterion],
        )
        trainer.fit(module, loader)


if __name__ == "__main__":
    main()
