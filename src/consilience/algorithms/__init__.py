"""One file a method. The methods exported here are known to the command and join the conformance suite."""

from consilience.algorithms.adf import ADF
from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.bayes_admm import BayesADMM
from consilience.algorithms.ditto import Ditto
from consilience.algorithms.downpour import Downpour
from consilience.algorithms.dp_pvi import DPPVI
from consilience.algorithms.ensemble import Ensemble
from consilience.algorithms.fedadamw import FedAdamW
from consilience.algorithms.fedavg import FedAvg
from consilience.algorithms.fedbe import FedBE
from consilience.algorithms.fedbn import FedBN
from consilience.algorithms.fedcgs import FedCGS
from consilience.algorithms.feddc import FedDC
from consilience.algorithms.feddyn import FedDyn
from consilience.algorithms.fedep import FedEP
from consilience.algorithms.fedex import FedEx
from consilience.algorithms.fedfisher import FedFisher, FedFisherKFAC
from consilience.algorithms.fedla import FedLA
from consilience.algorithms.fedlangevin import FedLangevin
from consilience.algorithms.fedlap import FedLap, FedLapCov
from consilience.algorithms.fednova import FedNova
from consilience.algorithms.fednp import FedNP
from consilience.algorithms.fednp_classes import FedNPClasses
from consilience.algorithms.fedpa import FedPA, FedPADiagonal
from consilience.algorithms.fedper import FedPer
from consilience.algorithms.fedprox import FedProx
from consilience.algorithms.fedrep import FedRep
from consilience.algorithms.fedsep import FedSEP
from consilience.algorithms.fedsgd import FedSGD
from consilience.algorithms.gan.bayesgan import BayesGAN
from consilience.algorithms.gan.epgan import EPGAN
from consilience.algorithms.gan.f2a import F2A
from consilience.algorithms.gan.fedavg_gan import FedAvgGAN
from consilience.algorithms.gan.fedgan import FedGAN
from consilience.algorithms.gan.probgan import ProbGAN
from consilience.algorithms.gan.signal_epgan import SignalEPGAN
from consilience.algorithms.last_layer import LastLayer
from consilience.algorithms.moon import MOON
from consilience.algorithms.partial_pooling import PartialPooling
from consilience.algorithms.pfedme import PFedMe
from consilience.algorithms.pfnm import PFNM
from consilience.algorithms.predbayes import PredBayes
from consilience.algorithms.private import Private
from consilience.algorithms.pvi import PVI, AsynchronousPVI
from consilience.algorithms.references import LocalOnly, Pooled
from consilience.algorithms.robust import Krum, Median, Robust, Rule, TrimmedMean
from consilience.algorithms.safl import SAFL
from consilience.algorithms.scaffold import SCAFFOLD
from consilience.algorithms.shared.accounting import epsilon
from consilience.algorithms.shared.averaging import Averaging, change
from consilience.algorithms.shared.factors import Factors
from consilience.algorithms.switch import Switch

__all__ = [
    "ADF", "DPPVI", "EPGAN", "F2A", "MOON", "PFNM", "PVI", "SAFL", "SCAFFOLD", "Algorithm", "AsynchronousPVI",
    "Averaging", "BayesADMM", "BayesGAN", "Ditto", "Downpour", "Ensemble", "Factors", "FedAdamW", "FedAvg", "FedAvgGAN",
    "FedBE", "FedBN", "FedCGS", "FedDC", "FedDyn", "FedEP", "FedEx", "FedFisher", "FedFisherKFAC", "FedGAN", "FedLA",
    "FedLangevin", "FedLap", "FedLapCov", "FedNP", "FedNPClasses", "FedNova", "FedPA", "FedPADiagonal", "FedPer",
    "FedProx", "FedRep", "FedSEP", "FedSGD", "Krum", "LastLayer", "LocalOnly", "Median", "PFedMe", "PartialPooling",
    "Pooled", "PredBayes", "Private", "ProbGAN", "Robust", "Rule", "SignalEPGAN", "Switch", "TrimmedMean", "algorithm",
    "change", "epsilon",
]  # fmt: skip
