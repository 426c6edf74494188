"""What an EP prior costs beside ProbGAN, and what computing clients together gains.

    python benchmarks/gan.py                       # a DCGAN of width 16 on Fashion-MNIST's shape; some minutes
    python benchmarks/gan.py --width 64 --batch 128 --side 32 --device cuda --compile

Ten clients with images of noise, ten generators and four discriminators. How methods take turns is said in contest.py.
The rows of tables of samples are made by gan_rows.py.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

import consilience as cs
from consilience.algorithms.gan.players import ADAM, NOISY
from consilience.models import dcgan
from consilience.recipes.epgan_variants import Spring
from contest import Contestant, contest, machine

CLIENTS, STEPS = 10, 4


def noise(side, batch):
    """Images that nobody can learn."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (CLIENTS * STEPS * batch, 1, side, side), dtype=torch.uint8, generator=generator)
    y = torch.arange(len(x)) % CLIENTS
    data = cs.Dataset(x, y, scale=torch.tensor(2 / 255), shift=torch.tensor(-1.0), name="noise")
    return cs.Federation.from_owner(data, y)


def methods(batch, epochs):
    """ProbGAN first: it is the measure."""
    noisy = replace(NOISY, batch_size=batch, epochs=epochs)
    plain, signal = replace(ADAM, batch_size=batch, epochs=epochs), cs.algorithms.SignalEPGAN(noisy)
    return {
        "ProbGAN": cs.algorithms.ProbGAN(noisy),
        "EP-ProbGAN": cs.EPGAN(noisy),
        "EP, f = 0": Spring(noisy),
        "EP, f": signal,
        "Mixture, f": replace(signal, components=10),
        "ProbGAN, a step each": cs.algorithms.ProbGAN(noisy, critic_steps=1),
        "ProbGAN, both at once": cs.algorithms.ProbGAN(noisy, critic_steps=None),
        "GAN": cs.FedGAN(plain, single=True),
        "GAN, a step each": cs.FedGAN(plain, single=True, critic_steps=1),
        "GAN, both at once": cs.FedGAN(plain, single=True, critic_steps=None),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", nargs="+", help="labels; the first is the measure")
    for name, value in {"width": 16, "batch_size": 32, "side": 28, "epochs": 5, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    federation = noise(options.side, options.batch_size)
    torch.manual_seed(0)
    shape = (1, options.side, options.side)
    pair = dcgan(shape, 100, options.width)
    task = cs.Adversarial(pair.generator, pair.discriminator, latent=100, generators=10, discriminators=4)

    def enter(method, chunk):
        workers = {"workers": 1, "threads": torch.get_num_threads()} if options.device == "cpu" else {}
        engine = cs.Simulator(device=options.device, chunk=chunk, compile=options.compile, **workers)
        return Contestant(method, task, federation, CLIENTS, engine=engine)

    steps, crew = options.epochs * STEPS, methods(options.batch_size, options.epochs)
    crew = {label: crew[label] for label in options.only or crew}
    print(f"{CLIENTS} clients x {steps} steps of {options.batch_size} images, width {options.width}, {options.side} px")
    print(f"{options.device}; {machine()}")
    contest({label: enter(method, CLIENTS) for label, method in crew.items()}, options.repeats)
    for label in () if options.only else ("GAN", "ProbGAN", "EP-ProbGAN"):
        contest({label: enter(crew[label], CLIENTS), "one by one": enter(crew[label], 1)}, options.repeats)


if __name__ == "__main__":
    main()
