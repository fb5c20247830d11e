"""A plan beside a real run: the trace of `jax.profiler` beside the plan's predictions.

`profile_folder` finds the files of a run; `xplane` and `trace_json` read the kernels of its devices from them. `steps` cuts
them into steps, `kernel_names` tells the class of a kernel by its name. `predictions` has the plan's side of the
table, and `comparison` is the table.

The format, by XLA's `cupti_collector.cc` and `xplane_schema.cc`: a plane `/device:GPU:0` for each GPU, in it a line `Stream
#13(Compute,MemcpyD2D)` for each stream, on it an event for each kernel or copy, under the kernel's name. An event has the
HLO instruction (`hlo_op`) and the module (`hlo_module`) that launched it. Kernels in a CUDA graph have neither.
"""
