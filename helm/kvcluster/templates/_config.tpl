{{- /* The configuration of the cluster as JSON: `config`, and what the chart derives. */ -}}
{{- define "kvcluster.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- range $path, $instead := fromYaml (include "kvcluster.derived" .) -}}
{{- $parts := splitList "." $path -}}
{{- $section := ternary $config (default dict (get $config (first $parts))) (eq (len $parts) 1) -}}
{{- if hasKey $section (last $parts) -}}
{{- fail (printf "config.%s is derived by the chart: %s" $path $instead) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $config "name" (include "kvcluster.fullname" .) -}}
{{- $server := default dict $config.server -}}
{{- $server = merge $server (dict "report_port" 7071) -}}
{{- $server = mergeOverwrite $server (dict "host" "0.0.0.0" "advertise" (include "kvcluster.headHost" .) "secret_file" "/etc/kvcluster/auth/secret" "token_file" "/etc/kvcluster/auth/tokens") -}}
{{- if .Values.auth.quotasKey }}{{ $server = merge $server (dict "quota_file" "/etc/kvcluster/auth/quotas") }}{{ end -}}
{{- if eq .Values.mode "node-local" }}{{ $server = merge $server (dict "socket_dir" (include "kvcluster.socketDir" .)) }}{{ end -}}
{{- if .Values.auth.severalTenants -}}
{{- if has "shm" (default list $server.transports) -}}
{{- fail "config.server.transports names shm, and auth.severalTenants is true: readers of shared memory map the pages of all tenants" -}}
{{- end -}}
{{- $server = merge $server (dict "transports" (list "tcp" "grpc")) -}}
{{- end -}}
{{- $_ := set $config "server" $server -}}
{{- $security := dict "encryption" .Values.security.encryption -}}
{{- if include "kvcluster.tls" . -}}
{{- $dir := include "kvcluster.tlsDir" . -}}
{{- $security = merge $security (dict "ca_file" (printf "%s/ca.crt" $dir) "cert_file" (printf "%s/tls.crt" $dir) "key_file" (printf "%s/tls.key" $dir)) -}}
{{- if .Values.security.clientCertificates }}{{ $_ := set $security "client_certificates" true }}{{ end -}}
{{- $_ := set $config "ray" (mergeOverwrite (default dict $config.ray) (dict "encryption" .Values.security.rayEncryption)) -}}
{{- end -}}
{{- $_ := set $config "security" $security -}}
{{- $_ := set $config "metrics" (mergeOverwrite (default dict $config.metrics) (dict "host" "0.0.0.0")) -}}
{{- if and .Values.head.state.enabled (ne .Values.mode "join") -}}
{{- $_ := set $config "coordinator" (mergeOverwrite (default dict $config.coordinator) (dict "state_dir" "/var/lib/kvcluster/state")) -}}
{{- end -}}
{{- with include "kvcluster.redisAddress" . -}}
{{- $password := ternary (dict "redis_password_file" "/etc/kvcluster/redis/password") (dict "redis_password_from_secret" true) (ne (include "kvcluster.redisSecret" $) "") -}}
{{- $_ := set $config "ray" (mergeOverwrite (default dict $config.ray) (dict "redis" .) $password) -}}
{{- end -}}
{{- $base := include "kvcluster.shardSettings" (default dict $config.shard) | fromJson -}}
{{- if $base }}{{ $_ := set $config "shard" $base }}{{ end -}}
{{- if gt (include "kvcluster.bytes" (dict "value" (default "0" $base.disk_bytes) "name" "config.shard.disk_bytes") | int64) 0 -}}
{{- $_ := set $config "shard" (merge $base (dict "disk_dir" "/var/lib/kvcluster/disk")) -}}
{{- end -}}
{{- $groups := dict -}}
{{- range $name, $group := fromJson (include "kvcluster.groups" .) -}}
{{- $shard := deepCopy (default dict $group.shard) -}}
{{- if gt (int64 $group.disk.bytes) 0 -}}
{{- $shard = merge (dict "stop_ms" $group.stopMs "disk_dir" (dig "shard" "disk_dir" "/var/lib/kvcluster/disk" $config)) $shard -}}
{{- end -}}
{{- if gt (int64 $group.gpu.count) 0 -}}
{{- $shard = merge $shard (dict "num_gpus" $group.numGpus) -}}
{{- end -}}
{{- $_ := set $groups $name (dict "shards" $group.perPod "per_node" true "resources" (dict $group.resource 1) "shard" $shard) -}}
{{- end -}}
{{- $_ := set $config "groups" $groups -}}
{{- $config | toJson -}}
{{- end -}}

{{- /* Settings that the chart writes, each with the value to set instead. */ -}}
{{- define "kvcluster.derived" -}}
name: "set fullnameOverride"
shards: "set shards.replicas and shards.perPod"
groups: "set groups"
server.host: "pods listen on all of their addresses"
server.advertise: "it is the name of the head's Service"
server.secret_file: "set auth.secretName"
server.token_file: "set auth.secretName"
server.quota_file: "set auth.quotasKey"
server.insecure: "tokens are asked for"
server.socket_dir: "set mode node-local"
security.encryption: "set security.encryption"
security.ca_file: "set security.certManager or security.existingSecrets"
security.cert_file: "set security.certManager or security.existingSecrets"
security.key_file: "set security.certManager or security.existingSecrets"
security.client_certificates: "set security.clientCertificates"
ray.encryption: "set security.rayEncryption"
metrics.host: "pods listen on all of their addresses"
{{- if ne .Values.mode "join" }}
coordinator.state_dir: "set head.state.enabled"
shard.disk_dir: "it is the volume of the disk tier"
{{- end }}
ray.redis: "set redis.enabled or redis.address"
ray.redis_password_file: "set redis.secretName"
ray.redis_password_from_secret: "leave redis.secretName empty"
{{- end -}}

{{- /* A table in TOML. Of (table, path), with "" as the path of the whole. */ -}}
{{- define "kvcluster.toml" -}}
{{- $path := .path -}}
{{- range $key, $value := .table -}}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ include "kvcluster.tomlKey" $key }} = {{ include "kvcluster.tomlValue" $value }}
{{- end -}}
{{- end -}}
{{- range $key, $value := .table -}}
{{- if kindIs "map" $value -}}
{{- $below := printf "%s%s%s" $path (ternary "." "" (ne $path "")) (include "kvcluster.tomlKey" $key) }}

[{{ $below }}]
{{- include "kvcluster.toml" (dict "table" $value "path" $below) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvcluster.tomlKey" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . }}{{ . }}{{ else }}{{ . | toJson }}{{ end -}}
{{- end -}}

{{- define "kvcluster.tomlValue" -}}
{{- if kindIs "slice" . -}}
[{{ range $index, $each := . }}{{ if $index }}, {{ end }}{{ $each | toJson }}{{ end }}]
{{- else if and (kindIs "float64" .) (eq (floor .) (float64 .)) -}}
{{ int64 . }}
{{- else -}}
{{ . | toJson }}
{{- end -}}
{{- end -}}

{{- /* Ports of the configuration as JSON: single ones as numbers, ranges as [first, last]. */ -}}
{{- define "kvcluster.ports" -}}
{{- $config := .Values.config -}}
{{- $metrics := int64 (dig "metrics" "port" 9400 $config) -}}
{{- $workers := int64 (dig "server" "port" 7070 $config) -}}
{{- $first := ternary (add $workers 30) (sub $workers 93) (le $workers 65442) -}}
{{- $behind := printf "%d-%d" $first (add $first 63) -}}
{{- $ports := dict
  "workers" $workers
  "reports" (int64 (dig "server" "report_port" 7071 $config))
  "gcs" (int64 (dig "ray" "port" 6379 $config))
  "metrics" $metrics
  "shardMetrics" (list (add $metrics 1) (add $metrics 64))
  "shards" (include "kvcluster.range" (dig "server" "shard_ports" "" $config | default $behind) | fromJsonArray)
  "rayNode" (include "kvcluster.range" (dig "ray" "node_ports" "6380-6387" $config) | fromJsonArray)
  "rayWorkers" (include "kvcluster.range" (dig "ray" "worker_ports" "10002-10129" $config) | fromJsonArray)
-}}
{{- range $name := list "workers" "reports" "metrics" -}}
{{- if lt (get $ports $name) 1 }}{{ fail (printf "the port of %s must be a fixed one: policies and probes name it" $name) }}{{ end -}}
{{- end -}}
{{- $ports | toJson -}}
{{- end -}}

{{- define "kvcluster.range" -}}
{{- $parts := splitList "-" (. | replace " " "") -}}
{{- if lt (int64 (first $parts)) 1 }}{{ fail (printf "%q is no range of ports: policies name them, so none may be any free port" .) }}{{ end -}}
[{{ int64 (first $parts) }}, {{ int64 (last $parts) }}]
{{- end -}}
