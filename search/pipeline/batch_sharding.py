"""Data parallelism inside of each stage: examples are split over its devices, parameters are whole on all of them.

It needs no search and fits every step that has microbatches, as it says of each value only which dim carries the examples.
What does not divide stays whole.
"""

from search.ir.spec import AXIS_NAMES
from search.pipeline.pipeline_step import PipelineStep
from search.plan.stage_programs import StageSharding


def batch_sharding(step: PipelineStep, num_devices: int) -> StageSharding:
    """Examples split over a stage's devices."""
    specs = {
        v: (dim,) for v, dim in step.example_dims.items() if step.values[v].shape[dim] % num_devices == 0
    }
    return StageSharding((num_devices,), AXIS_NAMES[1], specs, {})
