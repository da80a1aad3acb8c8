"""The scenes before and after a scene in its group, for the links that lead on."""

from __future__ import annotations

from scenarios import SceneInfo
from views import state


def neighbours(scene_id: str) -> tuple[SceneInfo | None, SceneInfo | None]:
    """The scene before and the one after `scene_id` in the order of the gallery, both of its group; None where the group begins or ends. Mutates nothing.

    Raises StopIteration for a scene that the library does not have.
    """
    known = state.scenes()
    group = next(info.group for info in known if info.id == scene_id)
    members = [info for info in known if info.group == group]
    place = next(i for i, info in enumerate(members) if info.id == scene_id)
    return (members[place - 1] if place else None, members[place + 1] if place + 1 < len(members) else None)
