"""What `helm test` runs: the API server must refuse a bad SpecDecodeDeployment with a reason, and take a good one.

Standard library alone. Both requests are server-side dry runs: nothing is stored.
"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def resource(depth: dict[str, int]) -> dict[str, object]:
    speculation = {"method": "eagle3", "draft": {"uri": "embedded://smollm2-135m-instruct-eagle3"}, "depth": depth}
    return {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeDeployment",
        "metadata": {"generateName": "helm-test-"},
        "spec": {"model": {"uri": "embedded://smollm2-135m-instruct"}, "speculation": speculation},
    }


def create(body: dict[str, object]) -> tuple[int, str]:
    """HTTP status and message of a dry-run create in the release's namespace."""
    with open(f"{ACCOUNT}/token") as token, open(f"{ACCOUNT}/namespace") as namespace:
        headers = {"Authorization": f"Bearer {token.read()}", "Content-Type": "application/json"}
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        host = f"[{host}]" if ":" in host else host
        path = f"/apis/specdecode.io/v1alpha1/namespaces/{namespace.read()}/specdecodedeployments?dryRun=All"
    request = urllib.request.Request(f"https://{host}:{port}{path}", json.dumps(body).encode(), headers)
    trust = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
    try:
        with urllib.request.urlopen(request, context=trust, timeout=30) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.load(refusal).get("message", "")


def main() -> int:
    status, message = create(resource({"min": 4, "initial": 3, "max": 2}))
    print(f"min 4, initial 3, max 2: {status} {message}")
    refused = status == 422 and "min <= initial <= max" in message
    status, message = create(resource({"min": 0, "initial": 3, "max": 5}))
    print(f"min 0, initial 3, max 5: {status} {message}")
    return 0 if refused and status == 201 else 1


sys.exit(main())
