"""The benchmark behind ``scripts/bench``: rdiag beside what people use instead, side by side in one run."""
