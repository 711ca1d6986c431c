"""Every error the package raises on purpose.

    KvistError
    ├── UsageError          an option, setting or argument cannot be used as given
    ├── SpecError           a model's description cannot be used
    │   ├── MissingField
    │   ├── WrongType
    │   ├── BadValue
    │   └── UnknownArchitecture
    ├── FormatError         a file is not what it says it is
    │   ├── Truncated
    │   └── Corrupt
    ├── WeightsError        tensors do not fit the model's description
    ├── CacheError
    │   ├── OutOfMemory     the pool that was asked for does not fit
    │   ├── OutOfBlocks     the pool exists, but holds too few free blocks
    │   ├── NotResident     a position is no longer, or not yet, stored
    │   └── LayoutMismatch
    ├── KernelError
    │   └── NoBackend       no kernel accepts the operation; every refusal is listed
    ├── RequestError
    │   ├── TooLong
    │   ├── BadSampling
    │   └── Aborted
    └── VerifyError

A message says what, with the numbers, what would have followed, and what to do.
The command line prints it without a traceback and exits with code 2.
"""


class KvistError(Exception):
    """Base of every error that kvist raises on purpose."""


class UsageError(KvistError):
    """An option, setting or argument cannot be used as given."""


class SpecError(KvistError):
    """A model's description cannot be used."""


class MissingField(SpecError):
    """A field that decides the result is absent."""


class WrongType(SpecError):
    """A field holds another type than the one it must have."""


class BadValue(SpecError):
    """A field holds a value outside its allowed range, or one that contradicts another field."""


class UnknownArchitecture(SpecError):
    """No row of the family table describes this architecture."""


class FormatError(KvistError):
    """A file is not what it says it is."""


class Truncated(FormatError):
    """A file ends before its own header says it does."""


class Corrupt(FormatError):
    """A file contradicts itself."""


class WeightsError(KvistError):
    """Tensors are missing, extra or of another shape than the model's description says."""


class CacheError(KvistError):
    """Base of what can go wrong with the cache."""


class OutOfMemory(CacheError):
    """The memory that was asked for is not there; nothing was allocated."""


class OutOfBlocks(CacheError):
    """The pool holds too few free blocks; nothing was reserved."""


class NotResident(CacheError):
    """A position is no longer stored, or was never written."""


class LayoutMismatch(CacheError):
    """Two layouts that must be equal are not."""


class KernelError(KvistError):
    """A kernel was called outside its contract."""


class NoBackend(KernelError):
    """No backend accepts the operation; the message lists each refusal with its reason."""


class RequestError(KvistError):
    """A request cannot be served as asked."""


class TooLong(RequestError):
    """The request does not fit the context or the pool."""


class BadSampling(RequestError):
    """Sampling settings are out of range or contradict each other."""


class Aborted(RequestError):
    """The request was aborted by its owner."""


class VerifyError(KvistError):
    """A check could not be carried out."""
