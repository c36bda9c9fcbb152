"""What a row is called: its method, and the hyper-parameters that tell rows of one method apart."""

from collections.abc import Mapping
from typing import Any

CODED = ("uniform", "rtn", "smoothquant")  # configured under several names by bits and group shape


def label(row: Mapping[str, Any]) -> str:
    """`kivi (K2 V2, groups of 32)`, from a table row's `method` and `params`."""
    found = _details(row["method"], row["params"])
    return row["method"] + (f" ({', '.join(found)})" if found else "")


def _details(method: str, params: Mapping[str, Any]) -> list[str]:
    if "alpha" in params:
        return [f"alpha={params['alpha']:g}", f"window_size={params['window_size']}"]
    if method in CODED:
        kind = "symmetric " if params.get("zero_point") == "symmetric" else ""
        static = ["static scales"] if params.get("scales") == "static" else []
        return [f"{params['bits_per_code']} bit {kind}per {params['granularity'].replace('_', ' and ')}", *static]
    if "k_bits" in params:
        searched = ["clips searched"] if params.get("clips") == "searched" else []
        return [f"K{params['k_bits']:g} V{params['v_bits']:g}", f"groups of {params['group']}", *searched]
    if "nbits" in params:
        return [f"{params['nbits']} bit"]
    if "importance" in params:
        more = [text for field, text in (("per_head", "per head"), ("balance", "balanced")) if params.get(field)]
        return [f"by {params['importance']}", *more]
    return []
