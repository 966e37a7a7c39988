{{- /* The container of a shard but for its name and mounts, in a pod of its own or beside an engine. There it has no
startup or readiness probe: the engine waits for neither. Of (root, name, group, sidecar). */ -}}
{{- define "kvcluster.shardContainer" -}}
{{- $ports := fromJson (include "kvcluster.ports" .root) -}}
{{- $group := .group -}}
image: {{ include "kvcluster.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command:
  {{- toYaml .root.Values.image.command | nindent 2 }}
args:
  - join
  - {{ printf "%s:%d" (include "kvcluster.headHost" .root) (int64 $ports.gcs) }}
  - --config
  - {{ include "kvcluster.configPath" .root }}
  - --node-ip
  - $(POD_IP)
  - --offer
  - {{ $group.resource }}={{ int64 $group.perPod }}
  # A changed ConfigMap reaches the head's running pod after a minute or so, and a new pod at once.
  - --config-wait-s
  - "150"
  - --leave-s
  - {{ int64 $group.leaveSeconds | quote }}
env:
  {{- include "kvcluster.env" .root | nindent 2 }}
  {{- with $group.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  {{- range $index := until (int $group.perPod) }}
  - name: kv-metrics{{ if $index }}-{{ $index }}{{ end }}
    containerPort: {{ add (index $ports.shardMetrics 0) $index }}
  {{- end }}
{{- if not .sidecar }}
startupProbe:
  {{- include "kvcluster.probe" (dict "root" .root "path" "/healthz" "port" "kv-metrics" "period" 5 "failures" 132) | nindent 2 }}
readinessProbe:
  {{- include "kvcluster.probe" (dict "root" .root "path" "/readyz" "port" "kv-metrics" "period" 5 "failures" 2) | nindent 2 }}
{{- end }}
livenessProbe:
  {{- include "kvcluster.probe" (dict "root" .root "path" "/healthz" "port" "kv-metrics" "period" 10 "failures" 60) | nindent 2 }}
resources:
  {{- $limits := mergeOverwrite (deepCopy $group.resources.limits) (dict "memory" $group.limit) }}
  {{- $requests := mergeOverwrite (deepCopy $group.resources.requests) (dict "memory" (default $group.limit $group.resources.requests.memory)) }}
  {{- if gt (int64 $group.gpu.count) 0 }}
  {{- $_ := set $limits $group.gpu.resource (int64 $group.gpu.count) }}
  {{- end }}
  {{- include "kvcluster.resources" (dict "limits" $limits "requests" $requests) | nindent 2 }}
{{ include "kvcluster.containerSecurity" (dict "user" .root.Values.runAsUser "group" .root.Values.runAsGroup) }}
{{- end -}}
