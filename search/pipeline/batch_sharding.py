"""Data parallelism inside of each replica: examples are split over its devices, parameters are whole on all of them.

It needs no search and fits every step that has microbatches, as it says of each value only which dim carries the examples.
What does not divide stays whole.
"""

from search.ir.spec import WHOLE
from search.pipeline.pipeline_step import PipelineStep
from search.plan.stage_programs import StageSharding


def batch_sharding(step: PipelineStep, num_devices: int) -> StageSharding:
    """Examples split over the devices of a stage's replicas, each of which has as many."""
    size = num_devices // step.num_replicas
    specs = {
        v: (WHOLE, dim) for v, dim in step.example_dims.items() if step.values[v].shape[dim] % size == 0
    }
    return StageSharding((step.num_replicas, size), ("replica", "data"), specs, {})
