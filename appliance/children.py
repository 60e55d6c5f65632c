"""Start the other processes of the appliance and know when they end.

A child inherits its ends of socket pairs and nothing else: no descriptor, no variable and no argument carries a secret.
Each child gets its own session, so a key press at the agent's terminal reaches the agent only, which then ends all in
order.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from dataclasses import dataclass

from appliance.channel import AsyncChannel
from appliance.hardening import clean_environment


@dataclass(slots=True)
class Child:
    """A running process and the agent's end of its control channel."""

    name: str
    process: asyncio.subprocess.Process
    channel: AsyncChannel

    @property
    def pid(self) -> int:
        """Give the process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Say whether the process has not ended yet."""
        return self.process.returncode is None

    async def dismiss(self, seconds: float = 10.0) -> bool:
        """Close its channel, which tells it to leave, then end it as :meth:`end` does."""
        self.channel.close()
        return await self.end(seconds)

    async def end(self, seconds: float) -> bool:
        """Wait for the process to leave by itself, then kill it.

        Returns:
            Whether it left by itself.
        """
        try:
            await asyncio.wait_for(self.process.wait(), seconds)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
            return False
        finally:
            self.channel.close()
        return True


async def start_api(engine: socket.socket) -> Child:
    """Start the API process; it answers 503 until it is told to serve.

    Args:
        engine: the API's end of the channel to the engine; closed here once the child has it.
    """
    with engine:
        return await _start("api", "appliance.api", {"--engine": engine.fileno()}, wipe_all_frees=True)


async def start_rank(index: int, engine: socket.socket) -> tuple[Child, int]:
    """Start the process of one device.

    Args:
        index: the rank.
        engine: the engine's end of the channel to the API; closed here once the child has it.

    Returns:
        The child, and the write end of the pipe on which it awaits the bundle key. The caller closes it.
    """
    key_read, key_write = os.pipe2(os.O_CLOEXEC)
    try:
        with engine:
            child = await _start(f"rank {index}", "appliance.rank", {"--engine": engine.fileno(), "--key": key_read})
    except BaseException:
        os.close(key_write)
        raise
    finally:
        os.close(key_read)
    return child, key_write


async def _start(name: str, module: str, descriptors: dict[str, int], *, wipe_all_frees: bool = False) -> Child:
    ours, theirs = socket.socketpair()
    with theirs:
        descriptors = {"--control": theirs.fileno()} | descriptors
        arguments = [word for option, number in descriptors.items() for word in (option, str(number))]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-s",
            "-P",
            "-m",
            module,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            env=clean_environment(os.environ, wipe_all_frees=wipe_all_frees),
            pass_fds=tuple(descriptors.values()),
            start_new_session=True,
        )
    return Child(name, process, await AsyncChannel.over(ours))
