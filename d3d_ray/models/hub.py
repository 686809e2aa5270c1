"""Is the hub there? transformers would ask again and again, for half a minute."""

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import httpx

_TIMEOUT_S = 5.0


def must_use_cache(name: str) -> bool:
    """Whether a model's files can come from the cache of the hub only, since it does not answer.

    Raises ``ValueError`` when they are not there either.
    """
    try:
        HfApi().model_info(name, timeout=_TIMEOUT_S)
    except (httpx.TransportError, OfflineModeIsEnabled) as error:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return True
        raise ValueError(
            f"{name!r} is not on this machine, and the hub does not answer ({error}): connect, run "
            f"`hf download {name}` where there is a network, or give the path of its folder"
        ) from error
    except HfHubHTTPError:
        return False  # It does answer; transformers says best what is wrong.
    return False
