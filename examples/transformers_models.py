"""Hugging Face transformers: a Llama with our attention, then a network of ours that Trainer trains and a pipeline samples.

python examples/transformers_models.py --steps 50
"""

import argparse

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
    pipeline,
)

from longstride import ModelConfig
from longstride.data import samples
from longstride.transformers import ByteTokenizer, LongstrideConfig, LongstrideForCausalLM, set_attention_pattern

CONTEXT, STRIDE = 256, 16


def fit(model: PreTrainedModel, steps: int) -> float:
    """Trains on the bundled text and returns the last loss, in nats per byte."""
    text = torch.frombuffer(bytearray(samples.text()), dtype=torch.uint8).long()
    rows = [{"input_ids": row, "labels": row} for row in text.split(CONTEXT)[:-1]]
    arguments = TrainingArguments(
        "trained", max_steps=steps, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=1, report_to=[],
        disable_tqdm=True, logging_strategy="steps", save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    torch.manual_seed(0)

    llama = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    set_attention_pattern(llama, f"local({STRIDE}) | column({STRIDE})")
    print(f"Llama with {llama.config.longstride_pattern}: {fit(llama, options.steps):.3f} nats")

    network = ModelConfig(2, 64, 4, CONTEXT, f"interleave(strided({STRIDE}))", f"matrix({STRIDE})")
    ours = LongstrideForCausalLM(LongstrideConfig.from_network(network))
    print(f"Longstride with {network.pattern}: {fit(ours, options.steps):.3f} nats")
    ours.save_pretrained("model")
    ByteTokenizer().save_pretrained("model")
    generator = pipeline("text-generation", model="model")
    print(generator("In 1945 ", max_new_tokens=40, do_sample=True, top_k=20)[0]["generated_text"])


if __name__ == "__main__":
    main()
