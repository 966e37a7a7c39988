{{- /* Ports of Ray on every node. Of the ports. */ -}}
{{- define "kvcluster.rayPorts" -}}
- {protocol: TCP, port: {{ index .rayNode 0 }}, endPort: {{ index .rayNode 1 }}}
- {protocol: TCP, port: {{ index .rayWorkers 0 }}, endPort: {{ index .rayWorkers 1 }}}
{{- end -}}

{{- /* Who reaches a shard. Of (ports, cluster, policy). */ -}}
{{- define "kvcluster.shardIngress" -}}
- from:
    {{- toYaml (concat .cluster .policy.engines) | nindent 4 }}
  ports:
    - {protocol: TCP, port: {{ index .ports.shards 0 }}, endPort: {{ index .ports.shards 1 }}}
- from:
    {{- toYaml .cluster | nindent 4 }}
  ports:
    {{- include "kvcluster.rayPorts" .ports | nindent 4 }}
- from:
    {{- toYaml .policy.monitoring | nindent 4 }}
  ports:
    - {protocol: TCP, port: {{ index .ports.shardMetrics 0 }}, endPort: {{ index .ports.shardMetrics 1 }}}
{{- end -}}

{{- /* What the cluster's pods reach: DNS, and one another. Of (root, cluster). */ -}}
{{- define "kvcluster.egress" -}}
- to:
    {{- toYaml .root.Values.networkPolicy.dns | nindent 4 }}
  ports:
    {{- range .root.Values.networkPolicy.dnsPorts }}
    - {protocol: UDP, port: {{ int64 . }}}
    - {protocol: TCP, port: {{ int64 . }}}
    {{- end }}
- to:
    {{- toYaml .cluster | nindent 4 }}
{{- end -}}

{{- /* All ports but those in the given ranges, in both protocols. */ -}}
{{- define "kvcluster.otherPorts" -}}
{{- $sorted := list -}}
{{- range . }}{{ $sorted = append $sorted (printf "%05d-%05d" (int64 (index . 0)) (int64 (index . 1))) }}{{ end -}}
{{- $next := 1 -}}
{{- range sortAlpha $sorted }}
{{- $parts := splitList "-" . }}
{{- $first := regexReplaceAll "^0+" (first $parts) "" | int64 }}
{{- $last := regexReplaceAll "^0+" (last $parts) "" | int64 }}
{{- if gt $first $next }}
- {protocol: TCP, port: {{ $next }}, endPort: {{ sub $first 1 }}}
{{- end }}
{{- $next = add $last 1 }}
{{- end }}
- {protocol: TCP, port: {{ $next }}, endPort: 65535}
- {protocol: UDP, port: 1, endPort: 65535}
{{- end -}}
