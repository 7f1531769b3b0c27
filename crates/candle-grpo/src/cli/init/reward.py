"""The reward of a completion: a short sentence with the word of its row."""

import json
import sys

for line in sys.stdin:
    # Keys: id, prompt, completion, finish_reason, completion_tokens, columns.
    sample = json.loads(line)
    text = sample["completion"].strip()
    has_word = sample["columns"]["word"] in text.lower()
    is_sentence = text.endswith(".") and 4 <= len(text.split()) <= 12
    # null is no score: the completion then does not train.
    score = 0.5 * has_word + 0.5 * is_sentence
    # Everything else must go to stderr.
    print(json.dumps({"id": sample["id"], "score": score}), flush=True)
