"""A method that switches from FedAvg to FedEP."""

import consilience as cs
from support.runs import TRAIN

AT, ROUNDS, SCALE = 3, 7, 0.4


FIRST = cs.FedAvg(TRAIN, server=cs.server.Adam(lr=0.1))


FEDEP = cs.FedEP(cs.inference.Identity(TRAIN, scale=SCALE))


SWITCH = cs.Switch(FIRST, FEDEP, at=AT)
