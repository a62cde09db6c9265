"""The Trainer of transformers with ISDA: a small ViT, two epochs on digits."""

import tempfile

from digits import create_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

import isda
from isda.integrations.transformers import ISDACallback, loss_func


def main() -> None:
    set_seed(0)
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
    )
    config.num_labels = 10
    data = create_digits()
    dataset = [{"pixel_values": data[i][0], "labels": data[i][1]} for i in range(len(data))]
    model = ViTForImageClassification(config)
    criterion = isda.attach(model, lambda_0=0.5)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=2,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=2e-3,
            logging_strategy="epoch",
            save_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=dataset,
            compute_loss_func=loss_func(criterion),
            callbacks=[ISDACallback(criterion)],
        )
        trainer.train()
    for record in trainer.state.log_history[:-1]:
        print(f"epoch {record['epoch']:g}: loss {record['loss']:.3f}")


if __name__ == "__main__":
    main()
