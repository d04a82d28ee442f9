"""Look inside a model: sinks, massive activations, dead layers, depth routing, and the cost of removing parts."""

from residua.diagnose.api import diagnose, diagnose_model, taps
from residua.diagnose.metric import Finding, Metric, Sentence
from residua.diagnose.schema import Diagnosis, ModelDiagnosis

__all__ = ["Diagnosis", "Finding", "Metric", "ModelDiagnosis", "Sentence", "diagnose", "diagnose_model", "taps"]
