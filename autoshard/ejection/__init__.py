"""The way out: a plan as plain JAX, in a file that does not import autoshard.

Two forms say a whole step. The *wrapper* jits the user's own step with the plan's shardings of arguments and results, and
constrains arguments as their first readers want them; XLA's partitioner propagates the rest. It is short, and a person
would write it so. It has no place for decisions inside the step: specs that propagation does not find, recomputation,
microbatches, pipelines. The *written* form has all of them. It is the program that autoshard runs, printed equation by
equation: long, but ordinary calls of `jax.lax` with `with_sharding_constraint` beside them.

The compiler decides between the two: a wrapper is taken if it compiles to the collectives and the peak of the plan's program
(`proof`). `layout` has the shardings at the step's border, `source` the spelling of values, `written` and `equations` print
programs, `files` has the files' templates, and `eject` puts them together.
"""
