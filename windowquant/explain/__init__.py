"""What a method did to one request, as numbers and as a picture."""

from windowquant.explain.explanation import Explanation
from windowquant.explain.request import explain

__all__ = ["Explanation", "explain"]
