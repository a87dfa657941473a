"""Moving weights from a sender to its receivers: shared memory, collectives or files, verified by digests.

The sender::

    with open_sender(manifest, transport, device) as sender:
        for name, tensor in weights:
            sender.put(name, tensor)
        digests = sender.finish()

A receiver, in another process::

    with open_receiver(manifest, transport, rank, device) as receiver:
        for name, tensor in receiver:
            parameters[name].copy_(tensor)
        digests = receiver.digests
"""

from rl_core.torch.transport.deadline import interrupt
from rl_core.torch.transport.receiver import Receiver, open_receiver
from rl_core.torch.transport.sender import Sender, open_sender

__all__ = ["Receiver", "Sender", "interrupt", "open_receiver", "open_sender"]
