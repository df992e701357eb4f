"""The log of failures: kinds of failed calls of tools, and its bound."""

from asyncrl.buffer.ledger import MAX_KINDS, FailureLog
from asyncrl.buffer.records import TOOL_FAILED, Failure
from asyncrl.errors import FailureClass


def of_tool(tool: str, error: str) -> Failure:
    return Failure(failure_class=FailureClass.DATA, reason=TOOL_FAILED, tool=tool, error=error)


def test_each_tool_and_type_of_error_is_a_kind_and_changes_no_streak() -> None:
    log = FailureLog(max_streak=2)
    for tool, error in [("price", "KeyError"), ("price", "NameError"), ("stock", "KeyError"), ("price", "KeyError")]:
        log.count(of_tool(tool, error), tool_calls=3)
    assert {count.first.label: count.tool_calls for count in log.counts()} == {
        "data/tool_failed/price/KeyError": 6,
        "data/tool_failed/price/NameError": 3,
        "data/tool_failed/stock/KeyError": 3,
    }
    assert (log.total, log.streak, log.too_many) == (12, None, False)
    again = FailureLog(max_streak=2)
    again.restore(log.state())
    assert again.counts() == log.counts()


def test_too_many_kinds_count_under_their_reason() -> None:
    log = FailureLog(max_streak=2)
    for number in range(2 * MAX_KINDS):
        log.count(of_tool(f"tool {number}", f"Error{number % 7}"), tool_calls=1)
    counts = log.counts()
    assert len(counts) == MAX_KINDS + 1
    assert (counts[-1].first.label, counts[-1].tool_calls) == ("data/tool_failed", MAX_KINDS)
    assert log.total == 2 * MAX_KINDS
    log.count(of_tool("tool 0", "Error0"), tool_calls=1)
    assert log.counts()[0].tool_calls == 2
