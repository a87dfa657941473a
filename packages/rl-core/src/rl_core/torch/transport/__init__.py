"""Moving weights from a sender to its receivers: shared memory, collectives or files, verified by digests.

The sender::

    end = SendingEnd(device)
    for manifest in versions:
        with end.transfer(manifest, transport) as sender:
            for name, tensor in weights:
                sender.put(name, tensor)
            digest = sender.finish()
    end.close()

A receiver, in another process::

    end = ReceivingEnd(device)
    for manifest in versions:
        with end.transfer(manifest, transport, rank) as receiver:
            for name, tensor in receiver:
                parameters[name].copy_(tensor)
        digest = receiver.digest
    end.close()
"""

from rl_core.torch.transport.channel import interrupt
from rl_core.torch.transport.disk import version_folder
from rl_core.torch.transport.ends import Receiver, ReceivingEnd, Sender, SendingEnd, open_receiver, open_sender

__all__ = [
    "Receiver",
    "ReceivingEnd",
    "Sender",
    "SendingEnd",
    "interrupt",
    "open_receiver",
    "open_sender",
    "version_folder",
]
