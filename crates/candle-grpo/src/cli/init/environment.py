"""An environment: the policy guesses a number, and hears whether it is higher or lower."""

import json
import random
import sys

for line in sys.stdin:
    # Keys: id, episode, turn, prompt, columns, state; from the first turn completion and finish_reason.
    request = json.loads(line)
    if request["turn"] is None:
        # The episode number depends on the seed of the run.
        number = random.Random(request["episode"]).randint(1, request["columns"]["highest"])
        answer = {"state": number}
    else:
        number, guess = request["state"], request["completion"].strip()
        if guess == str(number):
            answer = {"reward": 1, "done": True}
        elif guess.isdigit():
            hint = "higher" if int(guess) < number else "lower"
            answer = {"messages": [{"role": "user", "content": hint}], "state": number}
        else:
            answer = {"reward": -0.1, "done": True}
    print(json.dumps({"id": request["id"], **answer}), flush=True)
