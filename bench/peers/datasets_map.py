"""JSON lines -> token ids with Hugging Face datasets, as its documentation shows it: load_dataset, map in processes, one array.

For comparison only:  python datasets_map.py INPUT.jsonl TOKENIZER_FOLDER OUT.npy PROCESSES CACHE_FOLDER
"""
import sys

import datasets
import numpy as np
from transformers import PreTrainedTokenizerFast

source, folder, out, processes, cache = sys.argv[1:]
datasets.disable_progress_bars()
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)


def tokenize(batch):
    encoded = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)
    return {"ids": [ids + [tokenizer.eos_token_id] for ids in encoded["input_ids"]]}


data = datasets.load_dataset("json", data_files=source, split="train", cache_dir=cache)
data = data.map(tokenize, batched=True, num_proc=int(processes), remove_columns=data.column_names)
parts = []
for batch in data.with_format("arrow").iter(batch_size=10_000):
    for chunk in batch["ids"].chunks:
        parts.append(chunk.flatten().to_numpy(zero_copy_only=False).astype(np.uint16))
np.save(out, np.concatenate(parts))
