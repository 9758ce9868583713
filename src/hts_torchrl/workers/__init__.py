"""Worker processes, and how they meet.

| who                      | waits for                       | released by            |
|--------------------------|---------------------------------|------------------------|
| executor, between rounds | the start of the next round     | the collector          |
| executor, in a round     | its actions                     | actors                 |
| actor                    | at least one waiting environment| any executor           |
| collector                | the running round               | each executor's report |

Everybody's sleep ends as well when the parent closes the lifeline or dies; the collector's also
when a worker dies, or an executor shows no sign of life for ``timeout_s``.

With rollout nodes all of this is so inside of each node; the collector waits for the nodes.
"""
