"""JSON lines -> token ids with the library tokenizers, as one would write it by hand: a process, all its threads.

For comparison only:  python encode_batch.py INPUT.jsonl TOKENIZER_FOLDER OUT.npy
"""
import json
import sys

import numpy as np
from tokenizers import Tokenizer

source, folder, out = sys.argv[1:]
tokenizer = Tokenizer.from_file(folder + "/tokenizer.json")
end = tokenizer.token_to_id("<|endoftext|>")
parts = []
with open(source) as lines:
    while batch := lines.readlines(4 << 20):
        for encoding in tokenizer.encode_batch_fast([json.loads(line)["text"] for line in batch], add_special_tokens=False):
            parts.append(np.array(encoding.ids + [end], dtype=np.uint16))
np.save(out, np.concatenate(parts))
