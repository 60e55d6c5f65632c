"""A picture of the appliance for the command line, the console and health checks: numbers and public facts only.

By construction it has no field for keys, prompts, answers or tokens, so none can leak through it.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from appliance.lifecycle import State
from attestation.appraise import render

if TYPE_CHECKING:
    from appliance.agent import Agent
    from appliance.ranklink import RankLink

# What an operator can do next, by state.
NEXT = {
    State.COLD: "wait: the agent is starting",
    State.HARDENED: "lethe request --challenge FILE --out FILE, then carry the request to the owner",
    State.REQUESTED: "lethe grant FILE, when the owner's grant has come",
    State.SERVING: "nothing: the model is served",
    State.DRAINING: "nothing: the grant has ended and running answers are finishing",
    State.ZEROIZED: "start the agent again for a new session",
}


def snapshot(agent: Agent) -> dict[str, Any]:
    """Give the state of the agent as JSON members; docs/control.md describes each."""
    return {
        "node": agent.config.node.name,
        "state": agent.state.value,
        "next": NEXT.get(agent.state, "wait: this state passes by itself"),
        "assurance": agent.result.assurance if agent.result else "none",
        "simulated": agent.custody is not None and agent.custody.manifest.policy.accepts_simulated,
        "bundle": _bundle(agent),
        "attestation": render(agent.result) if agent.result else [],
        "machine": [dataclasses.asdict(fact) for fact in agent.facts],
        "grant_seconds_left": max(0, int(agent.deadline - agent.clock.monotonic())) if agent.deadline else 0,
        "api": _api(agent),
        "devices": [_device(rank) for rank in agent.ranks],
        "processes": _processes(agent),
        "wipe_record": str(agent.drill.record_path or "") if agent.drill else "",
    }


def _bundle(agent: Agent) -> dict[str, Any]:
    if agent.custody is None:
        return {}
    manifest = agent.custody.manifest
    return {
        "id": manifest.bundle_id.hex(),
        "name": manifest.name,
        "purpose": manifest.purpose,
        "manifest": manifest.digest.hex(),
        "owner": agent.custody.owner.key_id,
    }


def _api(agent: Agent) -> dict[str, Any]:
    if agent.api is None:
        return {}
    scheme = "https" if agent.config.api.tls else "http"
    return {
        "url": f"{scheme}://{agent.config.api.host}:{agent.api.listening.port}/v1",
        "certificate": str(agent.config.certificate) if agent.config.api.tls else "",
        "tls_key_sha384": agent.api.listening.tls_key_sha384.hex(),
        "model": agent.config.api.model,
        "active": agent.api.stats.active,
        "served": agent.api.stats.served,
        "refused": agent.api.stats.refused,
    }


def _device(rank: RankLink) -> dict[str, Any]:
    members: dict[str, Any] = {
        "device": rank.device,
        "opened_bytes": rank.progress.opened_bytes,
        "total_bytes": rank.progress.total_bytes,
        "plaintext_bytes": rank.progress.plaintext_bytes,
        "peak_plaintext_bytes": rank.progress.peak_plaintext_bytes,
    }
    for name, message in (("resident", rank.loaded), ("engine", rank.stats), ("wiped", rank.overwritten)):
        if message is not None:
            # Seconds become whole milliseconds: the line format has no floats.
            facts = dataclasses.asdict(message)
            members[name] = {
                key.replace("seconds", "milliseconds"): round(value * 1000) if isinstance(value, float) else value
                for key, value in facts.items()
                if key != "device"
            }
    return members


def _processes(agent: Agent) -> dict[str, int]:
    running = [rank.child for rank in agent.ranks] + ([agent.api.child] if agent.api else [])
    return {"agent": os.getpid()} | {child.name: child.pid for child in running if child.running}
