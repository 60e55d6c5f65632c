"""The first message to each process: what the configuration and the owner's manifest say it is to do."""

from __future__ import annotations

from appliance.config import Config
from appliance.custody import Custody
from appliance.protocol import ApiSettings, Load


def api_settings(config: Config, custody: Custody) -> ApiSettings:
    """Give the settings of the API process."""
    policy = custody.manifest.policy
    return ApiSettings(
        host=config.api.host,
        port=config.api.port,
        tls=config.api.tls,
        keys_file=str(config.api.keys_file),
        model=config.api.model,
        platform_banner="SIMULATED" if policy.accepts_simulated else "",
        max_body_bytes=config.api.max_body_kib << 10,
        max_output_tokens=policy.serving.max_output_tokens,
        max_queue=config.api.max_queue,
        request_seconds=config.api.request_seconds,
    )


def load_order(config: Config, custody: Custody, rank: int) -> Load:
    """Give the order of one rank; the key goes another way (provisioning/grant.py)."""
    serving = custody.manifest.policy.serving
    return Load(
        bundle=str(config.model.bundle),
        manifest_digest=custody.manifest.digest,
        owner_key=custody.owner_key,
        device=config.devices.slots[rank],
        rank=rank,
        world=len(config.devices.slots),
        dtype=config.devices.dtype,
        reader_threads=config.loading.readers,
        opener_threads=config.loading.openers,
        ring_bytes=config.loading.ring_mib << 20,
        open_on=config.loading.open_on,
        kv_cache_bytes=config.engine.kv_cache_mib << 20,
        max_context=serving.max_context,
        max_concurrent=serving.max_concurrent,
        compute_threads=config.devices.compute_threads,
    )
