"""The check of every answer that schemathesis does not have itself."""
import schemathesis


@schemathesis.check
def no_failure_of_the_server(ctx, response, case):
    """No 5xx but 503, which says when to come again."""
    status = response.status_code
    if status < 500:
        return
    if status == 503 and response.headers.get("retry-after"):
        return
    raise AssertionError(f"{status}: {response.text[:500]}")
