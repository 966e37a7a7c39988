#!/usr/bin/env bash
# Proves on a Kubernetes of yours what cannot be proved where kvcluster is tested (docs/kubernetes.md): installs a
# release into a namespace of its own, tries each claim, prints a table and takes everything away.
# shellcheck disable=SC2317 # the functions of claims are called by their names
set -euo pipefail
shopt -s inherit_errexit 2>/dev/null || true # bash 4.4; what follows does without it

usage() {
  cat <<'END'
usage: deploy/kubernetes/prove.sh --image REPOSITORY:TAG [OPTION...]

  --image IMAGE         the image of the chart, REPOSITORY:TAG or REPOSITORY@DIGEST, which nodes can pull
  --namespace NAME      a namespace that does not exist yet; it is made and deleted (default kvcluster-prove)
  --storage-class NAME  class of all volumes (default: the cluster's default class)
  --values FILE         more values of the chart, such as the image of Redis or tolerations
  --timeout SECONDS     the longest that each step may take (default 300)
  --keep                leave the release and the namespace for a look at them

Needs kubectl, helm and bash, and the right to make a namespace. Exit status: 0 if all claims hold, 1 if one does not, 2
if it could not begin.
END
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
chart=$here/../../helm/kvcluster
release=cache
name=$release-kvcluster # what the chart calls its objects
head=$name-head-0
shards="$name-shard-0 $name-shard-1"
clients="engine-a engine-b stranger monitor"
token_files=/etc/kvcluster-token
prompts=24 # 48 MiB, of 128 MiB in both shards
upgraded_bytes=96MiB
least_kept=90 # per cent of the hits

image="" namespace=kvcluster-prove storage_class="" values="" timeout=300 keep=no
while (($#)); do
  case $1 in
    --image | --namespace | --storage-class | --values | --timeout)
      (($# > 1)) || { echo "$1 needs a value" >&2; exit 2; }
      case $1 in
        --image) image=$2 ;;
        --namespace) namespace=$2 ;;
        --storage-class) storage_class=$2 ;;
        --values) values=$2 ;;
        --timeout) timeout=$2 ;;
      esac
      shift 2
      ;;
    --keep) keep=yes && shift ;;
    --help | -h) usage && exit 0 ;;
    *) echo "unknown option: $1" >&2 && usage >&2 && exit 2 ;;
  esac
done
[[ -n $image ]] || { echo "--image is missing: build one by: make image" >&2; exit 2; }
[[ $image = *@* || $image =~ :[^/:]+$ ]] || { echo "--image needs a tag or a digest: $image has none" >&2; exit 2; }
[[ $timeout =~ ^[1-9][0-9]*$ ]] || { echo "--timeout takes whole seconds, not $timeout" >&2; exit 2; }
for tool in kubectl helm; do
  command -v "$tool" >/dev/null || { echo "$tool is not installed" >&2; exit 2; }
done

# ------------------------------------------------------------------------------------------------ commands

exec 3>&1

shown() { # a command: prints it, whatever becomes of its output, and runs it
  printf '  $ %s\n' "$*" >&3
  "$@"
}

k() { # kubectl in the namespace
  shown kubectl -n "$namespace" "$@"
}

in_pod() { # a pod, then a job of prove_client.py and its arguments
  local pod=$1
  shift
  k exec -i "$pod" -- python3 - "$@" < "$here/prove_client.py"
}

fields() { # "pods" and what selects them, then columns, of each a line: kubectl get without a heading
  local columns=${*: -1}
  set -- "${@:1:$#-1}"
  kubectl -n "$namespace" get "$@" --no-headers -o "custom-columns=$columns"
}

value_of() { # NAME, and words NAME=VALUE
  local word
  for word in $2; do
    [[ $word != "$1="* ]] || printf '%s' "${word#*=}"
  done
}

fail() { # why; ends the claim
  note "$*"
  exit 1
}

note() { # what the table says of this claim
  printf '%s' "$*" > "$work/note"
}

address_of() { # a pod
  fields pod "$1" IP:.status.podIP
}

pods_now() { # each pod of the release with what changes when it, or its container, is another one
  fields pods -l "app.kubernetes.io/instance=$release" --sort-by=.metadata.name \
    NAME:.metadata.name,UID:.metadata.uid,RESTARTS:.status.containerStatuses[0].restartCount
}

uid_of() { # kind, name
  fields "$1" "$2" UID:.metadata.uid
}

roll_out() { # waits until every StatefulSet is as it should be
  local each
  for each in redis head shard; do
    k rollout status "statefulset/$name-$each" "--timeout=${timeout}s"
  done
}

await_another() { # a pod and its uid: waits until its successor is ready
  local until=$((SECONDS + timeout)) now
  while now=$(fields pod "$1" --ignore-not-found UID:.metadata.uid) && [[ -z $now || $now = "$2" ]]; do
    ((SECONDS < until)) || fail "no pod took the place of $1"
    sleep 1
  done
  k wait "pod/$1" --for=condition=Ready "--timeout=${timeout}s"
}

connection() { # the address that engines are given
  kubectl -n "$namespace" get configmap "$name-connection" -o 'jsonpath={.data.KVCLUSTER_ADDRESS}'
}

hits() { # how many blocks of all prompts an engine loads, of how many; fails for a wrong byte
  local said
  said=$(in_pod engine-b load "$(connection)" "$token_files/token" "$prompts" 60) || exit 1
  printf '    %s\n' "$said" >&3
  [[ $(value_of wrong "$said") = 0 ]] || fail "blocks came with other bytes than were stored: $said"
  value_of blocks "$said"
}

kept() { # hits before: fails if there are fewer than $least_kept % now, and says how many there are
  local now
  now=$(hits) || exit 1
  (($1 > 0 && now * 100 >= $1 * least_kept)) || fail "$now of $1 hits kept"
  printf '%s of %s hits kept (%s %%)' "$now" "$1" "$((now * 100 / $1))"
}

# ---------------------------------------------------------------------------------------------- what is made

new_token() {
  head -c 32 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=\n'
}

token_line() { # a file with a token: its line of the token file
  local digest
  if command -v sha256sum >/dev/null; then digest=$(sha256sum "$1"); else digest=$(shasum -a 256 "$1"); fi
  printf 'sha256:%s  prove\n' "${digest%% *}"
}

write_secrets() { # token files whose tokens the cluster is to know
  local each
  for each in "$@"; do token_line "$work/$each"; done > "$work/tokens"
  kubectl -n "$namespace" create secret generic "$name-auth" --dry-run=client -o yaml --from-file="$work/secret" \
    --from-file="$work/tokens" | k apply -f -
}

client_pod() { # a name and a label: a pod that keeps `restricted`, and waits for what is run in it
  cat <<END
apiVersion: v1
kind: Pod
metadata: {name: $1, labels: {app: kvcluster-prove, $2: "true"}}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: 1
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile: {type: RuntimeDefault}
  containers:
    - name: client
      image: "$image"
      command: [sleep, infinity]
      env: [{name: HOME, value: /tmp}]
      envFrom: [{configMapRef: {name: $name-connection}}]
      resources: {requests: {cpu: 50m, memory: 128Mi}, limits: {memory: 512Mi}}
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
        seccompProfile: {type: RuntimeDefault}
      volumeMounts:
        - {name: token, mountPath: $token_files, readOnly: true}
        - {name: tls, mountPath: /etc/kvcluster-tls, readOnly: true}
        - {name: tmp, mountPath: /tmp}
  volumes:
    - {name: token, secret: {secretName: prove-tokens, defaultMode: 0440}}
    # With values that say security.encryption: tls; otherwise there is no such Secret.
    - {name: tls, secret: {secretName: $name-shard-tls, optional: true, items: [{key: ca.crt, path: ca.crt}]}}
    - {name: tmp, emptyDir: {}}
END
}

with_release() { # install or upgrade, then more values as --set
  local given=("$1" "$release" "$chart" -n "$namespace" -f "$here/prove-values.yaml")
  shift
  [[ -z $values ]] || given+=(-f "$values")
  if [[ $image = *@* ]]; then
    given+=(--set "image.repository=${image%%@*}" --set "image.digest=${image#*@}")
  else
    given+=(--set "image.repository=${image%:*}" --set-string "image.tag=${image##*:}")
  fi
  if [[ -n $storage_class ]]; then
    given+=(--set "shards.disk.storageClassName=$storage_class" --set "head.state.storageClassName=$storage_class")
    given+=(--set "redis.storage.storageClassName=$storage_class")
  fi
  shown helm "${given[@]}" "$@"
}

# ------------------------------------------------------------------------------------------------ the claims

refuses_others() {
  local said
  said=$(k run unrestricted --image="$image" --privileged --restart=Never --dry-run=server 2>&1) \
    && fail "a privileged pod was admitted: this cluster does not enforce Pod Security"
  [[ $said = *PodSecurity* ]] || fail "a privileged pod was refused for another reason: $said"
}

admits_the_release() {
  local each
  write_secrets token
  k create secret generic prove-tokens --from-file="$work/token" --from-file="$work/next"
  with_release install
  for each in engine-a engine-b; do client_pod "$each" kvcluster-client | k apply -f -; done
  client_pod stranger kvcluster-prove-stranger | k apply -f -
  client_pod monitor kvcluster-monitoring | k apply -f -
  for each in redis=1 head=1 shard=2; do
    k wait "statefulset/$name-${each%=*}" --for="jsonpath={.status.replicas}=${each#*=}" "--timeout=${timeout}s" \
      || fail "pods of $name-${each%=*} are missing: $(fields events --field-selector reason=FailedCreate WHY:.message)"
  done
  note "$(fields pods NAME:.metadata.name | wc -l | tr -d ' ') pods"
}

schedules_and_binds() {
  local claims
  k wait pod --all --for=condition=PodScheduled "--timeout=${timeout}s"
  k wait pvc --all --for='jsonpath={.status.phase}=Bound' "--timeout=${timeout}s"
  claims=$(fields pvc NAME:.metadata.name | wc -l)
  ((claims == 4)) || fail "$claims claims of volumes, and not 4: state of the head, data of Redis, disk of each shard"
  note "4 volumes, class $(fields pvc "disk-${shards%% *}" CLASS:.spec.storageClassName)"
}

answers_probes() {
  roll_out
  # shellcheck disable=SC2046,SC2086 # several names
  k wait --for=condition=Ready "--timeout=${timeout}s" $(printf 'pod/%s ' $clients)
}

loads_what_was_stored() {
  local said now
  said=$(in_pod engine-a store "$(connection)" "$token_files/token" "$prompts")
  printf '    %s\n' "$said" >&3
  [[ $(value_of blocks "$said") = "$(value_of of "$said")" ]] || fail "not all was stored: $said"
  now=$(hits)
  [[ $now = "$(value_of of "$said")" ]] || fail "$now of $(value_of of "$said") blocks were loaded"
  note "$now blocks stored by engine-a and loaded by engine-b, every byte compared"
}

at() { # ports of the head's pod, of each shard's pod, and of the head's Service: prints HOST:PORT, a line each
  local each ip port
  ip=$(address_of "$head")
  for port in $1; do printf '%s:%s\n' "$ip" "$port"; done
  for each in $shards; do
    ip=$(address_of "$each")
    for port in $2; do printf '%s:%s\n' "$ip" "$port"; done
  done
  ip=$(connection)
  for port in $3; do printf '%s:%s\n' "${ip%:*}" "$port"; done
}

lets_in() { # a pod, then what it is to reach, a line each: fails if it reaches less or more of all ports of the release
  local got want
  # shellcheck disable=SC2046 # several targets
  got=$(in_pod "$1" reach $(at "7070 7071 6379 6380 9400" "7100 6380 9401" "7070 7071 6379"))
  printf '    %s\n' "$got" >&3
  got=$(value_of open "$got" | tr ',' '\n' | sort | paste -s -d, -)
  want=$(printf '%s\n' "$2" | sort -u | paste -s -d, -)
  [[ $got = "$want" ]] || fail "$1 reaches ${got:-nothing}, and should reach ${want:-nothing}"
}

lets_the_cluster_in() { # the control: something listens at each of these ports
  local own=${shards%% *}
  lets_in "$own" "$(at "7070 7071 6379 6380" "7100 6380" "7070 7071 6379"; printf '%s:9401\n' "$(address_of "$own")")"
}

keeps_strangers_out() {
  lets_in stranger ""
}

lets_engines_in() {
  lets_in engine-a "$(at 7070 7100 7070)"
}

lets_monitoring_in() {
  local said
  lets_in monitor "$(at 9400 9401 "")"
  # shellcheck disable=SC2046 # several targets
  said=$(in_pod monitor scrape $(at 9400 9401 ""))
  note "/healthz, /readyz and /metrics of 3 processes: $said"
}

follows_tokens() {
  local before said gone
  before=$(pods_now)
  in_pod engine-a refused "$(connection)" "$token_files/next" 0
  write_secrets token next
  said=$(in_pod engine-a admitted "$(connection)" "$token_files/next" "$timeout")
  write_secrets token
  gone=$(in_pod engine-a refused "$(connection)" "$token_files/next" "$timeout")
  [[ $(pods_now) = "$before" ]] || fail "a pod or a container was restarted"
  note "a new token after $(value_of seconds "$said") s, its end after $(value_of seconds "$gone") s, no restart"
}

evict() { # a pod
  local metadata='"metadata": {"name": "'$1'", "namespace": "'$namespace'"}'
  printf '{"apiVersion": "policy/v1", "kind": "Eviction", %s}' "$metadata" \
    | shown kubectl create --raw "/api/v1/namespaces/$namespace/pods/$1/eviction" -f -
}

refuses_two_evictions() {
  local said first=${shards%% *} second=${shards##* } uid
  k wait "pdb/$name-shard" --for='jsonpath={.status.disruptionsAllowed}=1' "--timeout=${timeout}s"
  uid=$(uid_of pod "$first")
  evict "$first" >/dev/null
  said=$(evict "$second" 2>&1) && fail "both pods of the group were evicted at once"
  [[ $said = *"disruption budget"* ]] || fail "the second eviction was refused for another reason: $said"
  await_another "$first" "$uid"
}

keeps_volumes() {
  local before volume pod=${shards%% *} uid ratio
  uid=$(uid_of pod "$pod")
  volume=$(fields pvc "disk-$pod" VOLUME:.spec.volumeName)
  before=$(hits)
  k delete pod "$pod" "--timeout=${timeout}s"
  await_another "$pod" "$uid"
  [[ $(fields pvc "disk-$pod" VOLUME:.spec.volumeName) = "$volume" ]] || fail "$pod came back with another volume"
  ratio=$(kept "$before")
  note "$ratio, volume $volume"
}

outlives_the_head() {
  local before others uid ratio
  uid=$(uid_of pod "$head")
  others=$(pods_now | grep -v "^$head ")
  before=$(hits)
  k delete pod "$head" "--timeout=${timeout}s"
  await_another "$head" "$uid"
  ratio=$(kept "$before")
  note "$ratio"
  [[ $(pods_now | grep -v "^$head ") = "$others" ]] || fail "a shard or Redis was restarted with the head"
}

upgrades() {
  local before each first second of_head ratio
  first=$(uid_of pod "${shards%% *}")
  second=$(uid_of pod "${shards##* }")
  of_head=$(uid_of pod "$head")
  before=$(hits)
  with_release upgrade --set "config.shard.ram_bytes=$upgraded_bytes"
  roll_out
  for each in "${shards%% *}=$first" "${shards##* }=$second"; do
    [[ $(uid_of pod "${each%=*}") != "${each#*=}" ]] || fail "${each%=*} was not replaced"
  done
  [[ $(uid_of pod "$head") = "$of_head" ]] || fail "the head was replaced, too"
  ratio=$(kept "$before")
  note "RAM tier 64MiB to $upgraded_bytes: $ratio"
}

uninstalls() {
  local left
  shown helm uninstall "$release" -n "$namespace"
  k wait pod -l "app.kubernetes.io/instance=$release" --for=delete "--timeout=${timeout}s"
  left=$(kubectl -n "$namespace" get -o name -l "app.kubernetes.io/instance=$release" \
    statefulset,service,configmap,serviceaccount,networkpolicy,poddisruptionbudget)
  [[ -z $left ]] || fail "these are left: $(printf '%s' "$left" | tr '\n' ' ')"
  left=$(fields pvc NAME:.metadata.name | wc -l)
  ((left == 4)) || fail "$left claims of volumes are left, and not 4"
  k delete pvc --all "--timeout=${timeout}s"
  note "4 claims of volumes were left, and deleted"
}

# ------------------------------------------------------------------------------------------------- the run

titles=() verdicts=() notes=() failed=0

claim() { # a title and a function: whether it holds. Call it plainly: within a condition nothing in it would end it
  local status
  printf '\n=== %s\n' "$1"
  : > "$work/note"
  set +e
  (
    set -e
    "$2"
  )
  status=$?
  set -e
  ((status == 0)) || [[ -s $work/note ]] || note "a command above failed"
  titles+=("$1") notes+=("$(cat "$work/note")")
  if ((status)); then verdicts+=(FAILED) failed=$((failed + 1)); else verdicts+=(holds); fi
  printf -- '--- %s %s\n' "${verdicts[${#verdicts[@]} - 1]}" "${notes[${#notes[@]} - 1]}"
}

without_failures() { # ends the run here if anything has failed, since the rest would fail by it
  ((failed == 0)) || finish "the claims after this one were not tried"
}

finish() { # what else to say; prints the table and ends the script
  local each
  printf '\n%s\n' "$namespace, image $image${storage_class:+, class $storage_class}"
  for each in "${!titles[@]}"; do
    printf '%-7s %s%s\n' "${verdicts[each]}" "${titles[each]}" "${notes[each]:+: ${notes[each]}}"
  done
  printf '\n%s\n' "$1"
  exit "$((failed > 0))"
}

clean() { # the end, whatever came of it
  local status=$?
  trap - EXIT
  rm -rf "$work"
  if [[ $made = yes && $keep = yes ]]; then
    printf '\nto remove it: kubectl delete namespace %s\n' "$namespace"
  elif [[ $made = yes ]]; then
    printf '\n'
    shown kubectl delete namespace "$namespace" "--timeout=${timeout}s" || status=1
  fi
  exit "$status"
}

made=no
work=$(mktemp -d)
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
umask 077
for each in secret token next; do new_token > "$work/$each"; done

printf 'context %s\n' "$(kubectl config current-context)"
there=$(kubectl get namespace "$namespace" --ignore-not-found -o name) || exit 2
[[ -z $there ]] || { echo "the namespace $namespace exists: choose another by --namespace" >&2; exit 2; }
shown kubectl create namespace "$namespace" || exit 2
made=yes
shown kubectl label namespace "$namespace" pod-security.kubernetes.io/enforce=restricted || exit 2

claim "the namespace refuses what is not restricted" refuses_others
claim "restricted admits every pod" admits_the_release
without_failures
claim "pods are scheduled and volumes bound" schedules_and_binds
without_failures
claim "startup and readiness probes succeed" answers_probes
without_failures
claim "what one pod stores another loads" loads_what_was_stored
without_failures
claim "the cluster's pods reach one another" lets_the_cluster_in
claim "a pod without the label reaches no port" keeps_strangers_out
claim "an engine's pod reaches the cache alone" lets_engines_in
claim "monitoring reaches the metrics alone" lets_monitoring_in
claim "changed tokens are followed" follows_tokens
claim "a second eviction at once is refused" refuses_two_evictions
claim "a deleted pod comes back with its volume" keeps_volumes
claim "shards go on when the head is replaced" outlives_the_head
claim "a rolling upgrade keeps the hits" upgrades
if [[ $keep = no ]]; then claim "uninstalling leaves the volumes alone" uninstalls; fi

finish "No script can try: vLLM itself (vllm.yaml), GPUs, nodes that go (drains, spot nodes), volumes that follow pods to
other nodes and zones, quotas and webhooks, the Prometheus operator and Grafana, join mode beside KubeRay, IPv6."
