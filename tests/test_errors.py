"""Errors of asyncrl cross processes unchanged."""

import inspect
import pickle

import pytest

from asyncrl import errors

CLASSES = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, errors.AsyncRLError)]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_keeps_its_class_its_message_and_its_attributes(kind: type[errors.AsyncRLError]) -> None:
    parameters = inspect.signature(kind.__init__).parameters.values()
    keywords = {each.name: f"its {each.name}" for each in parameters if each.kind is each.KEYWORD_ONLY}
    sent = kind("the buffer is gone", **keywords)
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is kind
    assert str(received) == "the buffer is gone"
    assert vars(received) == vars(sent)
