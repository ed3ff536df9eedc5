"""The slots that a sequence takes, which are more than its tokens where segments must have round lengths.

One rule: planner and collator count the same slots, so a bin that was planned also fits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def stored_lengths(lengths: npt.NDArray[np.signedinteger], align_to: int) -> npt.NDArray[np.signedinteger]:
    """Each length rounded up to a multiple of `align_to`, in the same dtype, which must have room for it."""
    if align_to == 1:
        return lengths
    return (lengths + (align_to - 1)) // align_to * align_to
