"""`keepstep predict`: batch inference from a run's checkpoint, Parquet to Parquet, each row exactly once."""

from keepstep.predict.request import Request

__all__ = ["Request"]
