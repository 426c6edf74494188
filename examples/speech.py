"""Speakers as clients: CTC on AN4, words from a posterior over networks, and a report of what was understood.

    pip install 'consilience[speech]'
    python examples/speech.py [--quick] [--out runs/speech]

AN4 (948 utterances of 74 speakers) is in the folder that CONSILIENCE_DATA names.
"""

import argparse
from pathlib import Path

import torch

import consilience as cs
from consilience.models import acoustic
from consilience.optim import Adam
from consilience.recipes.speech_setting import speaker_groups

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true", help="short commands of twelve speakers, a small network")
parser.add_argument("--out", type=Path, default=Path("runs/speech"))
options = parser.parse_args()

data = cs.load("an4")
train, test = data.train, data.test
if options.quick:  # YES, NO, STOP, …; the same speakers are heard again
    short = (train.y.sizes <= 6) & (train.groups["speaker"] < 12)
    train = test = train[short]
hidden, layers, epochs = (32, 1, 8) if options.quick else (128, 3, 3)
batch, rounds, clients = (4, 8, 3) if options.quick else (8, 30, 16)

# Log-mel features of different lengths in, a distribution over characters for every 30 ms out.
torch.manual_seed(0)
model = acoustic(train.x.shape[1:], len(train.classes), hidden=hidden, layers=layers, dropout=0.0)
task = cs.CTC(model, train.classes[1:], augment=cs.data.SpecAugment())

# Clients are groups of speakers; FedAvg first, then a posterior over the weights.
chain = Adam(lr=0.01 if options.quick else 2e-3, batch_size=batch, epochs=epochs)
method = cs.Switch(cs.FedAvg(chain), cs.FedEP(cs.inference.Identity(chain, scale=50.0)), at=rounds - 1)
run = cs.fit(method, task, speaker_groups(train, clients), rounds=rounds, test=test, out=options.out)
for kind, scores in (("point", run.evaluation.point), ("marginal", run.evaluation.marginal)):
    print(f"{kind}: WER {scores['wer']:.2f}, CER {scores['cer']:.2f}, ECE of confidences {scores['ece']:.2f}")

# Test utterances through the posterior: frames averaged over ten networks, then read as characters.
some = test[: 5 * (len(test) // 5) : len(test) // 5]
said = run.task.text(some.targets(torch.arange(len(some))))
for reference, read in zip(said, run.task.decode(run.predict(some.x)), strict=True):
    print(f"said {reference!r}, understood {read.text!r} with confidence {read.confidence:.2f}")
print(cs.write_report(options.out))
