"""Settings of one-shot methods."""

import consilience as cs

ENGINE = cs.Simulator(device="cpu", precision="float64", chunk=3, workers=1)


TRAIN = cs.optim.AMSGrad(lr=0.04, epochs=2, batch_size=16)


STILL = cs.SGD(lr=0.0)


MANY = cs.matching.BetaBernoulli(variance=0.1, mass=20.0)  # finds more units than any client has


def learn(algorithm, task, federation, rounds=1, **options):
    return cs.fit(algorithm, task, federation, **{"rounds": rounds, "engine": ENGINE, "progress": False} | options)
