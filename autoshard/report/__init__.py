"""A plan as one HTML page, to be read by people: who book hardware, who review a plan, who ask why a step takes so long.

The page is made from the plan alone and loads nothing: text, styles, drawings and a little script are in one file. It says
the answer first, as the printed plan does, and the reasons below. Each drawing has a table of its numbers; nothing is said
by colour or by the mouse alone.

`page` puts the sections together. `answer` has the numbers that come first and `sentences` the words, `cluster_map` the
devices, `step_chart` a device over time, `schedule_chart` and `pipeline_memory` a pipeline's workers, `roofline` the heavy
ops, `argument_tree` the arguments, with `spec_shares` for their bytes. `stacked` draws memory over time. `markup` makes
elements and escapes text: names come from users. `page.html`, `page.css` and `page.js` are
the parts of the page that no plan changes.
"""
