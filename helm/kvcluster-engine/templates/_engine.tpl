{{- /* What an engine's pod needs to use a release of kvcluster, for the templates of the engine's own chart. Each template
takes a dict, `.Values.kvcluster` of the engine's chart:

    fullname: cache-kvcluster   # of the release: the name before `-connection` of its ConfigMap
    tokenSecret: cache-token    # the Secret with the engine's token
    tokenKey: token
    tls:                        # of a release with security.encryption tls: one of the three, for the file ca.crt
      secret: cache-kvcluster-shard-tls # a Secret of this namespace, of which nothing else is mounted
      configMap: kvcluster-ca   # or a ConfigMap, in another namespace
      clientSecret: cache-kvcluster-tenant-default-tls # or a Secret with a certificate for the engine's tenant, all of
                                # which is mounted: with security.clientCertificates. The pod needs an fsGroup
    nodeLocal:                  # of a release in mode node-local, as its own values have them
      enabled: true
      group: 10002
      hostPath: /run/kvcluster/llm-cache-kvcluster
      csi: {}

    metadata:
      labels:
        {{- include "kvcluster-engine.podLabels" .Values.kvcluster | nindent 8 }}
    spec:
      securityContext:
        {{- include "kvcluster-engine.podSecurityContext" .Values.kvcluster | nindent 8 }}
      containers:
        - name: vllm
          env:
            {{- include "kvcluster-engine.env" .Values.kvcluster | nindent 12 }}
          volumeMounts:
            {{- include "kvcluster-engine.volumeMounts" .Values.kvcluster | nindent 12 }}
      volumes:
        {{- include "kvcluster-engine.volumes" .Values.kvcluster | nindent 8 }}
*/ -}}

{{- /* The label by which the release's policies let the pod in. */ -}}
{{- define "kvcluster-engine.podLabels" -}}
kvcluster-client: "true"
{{- end -}}

{{- /* The group that may connect to the sockets of the node's shards; empty without nodeLocal. */ -}}
{{- define "kvcluster-engine.podSecurityContext" -}}
{{- if dig "nodeLocal" "enabled" false . -}}
supplementalGroups: [{{ int64 (required "kvcluster.nodeLocal.group: give nodeLocal.group of the release" .nodeLocal.group) }}]
{{- end -}}
{{- end -}}

{{- /* KV_TRANSFER_CONFIG, for `vllm serve MODEL --kv-transfer-config "$(KV_TRANSFER_CONFIG)"`, and what `kvcluster doctor`
in the pod reads. */ -}}
{{- define "kvcluster-engine.env" -}}
{{- $names := list "KV_TRANSFER_CONFIG" "KVCLUSTER_ADDRESS" -}}
{{- if dig "nodeLocal" "enabled" false . }}{{ $names = append $names "KVCLUSTER_SOCKET_DIR" }}{{ end -}}
{{- $mayLack := list "KVCLUSTER_ENCRYPTION" "KVCLUSTER_CA_FILE" -}}
{{- if dig "tls" "clientSecret" "" . }}{{ $mayLack = concat $mayLack (list "KVCLUSTER_CERT_FILE" "KVCLUSTER_KEY_FILE") }}{{ end -}}
{{- range $name := concat $names $mayLack }}
- name: {{ $name }}
  valueFrom:
    configMapKeyRef:
      name: {{ required "kvcluster.fullname: give the name before -connection of the ConfigMap of the release" $.fullname }}-connection
      key: {{ $name }}
      {{- if has $name $mayLack }}
      optional: true
      {{- end }}
{{- end }}
{{- end -}}

{{- define "kvcluster-engine.volumeMounts" -}}
- name: kvcluster-token
  mountPath: /etc/kvcluster-token
  readOnly: true
{{- if .tls }}
- name: kvcluster-tls
  mountPath: /etc/kvcluster-tls
  readOnly: true
{{- end }}
{{- if dig "nodeLocal" "enabled" false . }}
- name: kvcluster-sockets
  mountPath: /var/run/kvcluster
  readOnly: true
{{- end }}
{{- end -}}

{{- define "kvcluster-engine.volumes" -}}
- name: kvcluster-token
  secret:
    secretName: {{ required "kvcluster.tokenSecret: give the Secret with the engine's token" .tokenSecret }}
    defaultMode: 0440
    items:
      - key: {{ default "token" .tokenKey }}
        path: token
{{- with .tls }}
{{- $given := list }}
{{- range $kind := list "secret" "configMap" "clientSecret" }}{{ if index $.tls $kind }}{{ $given = append $given $kind }}{{ end }}{{ end }}
{{- if ne (len $given) 1 }}{{ fail "kvcluster.tls: give one of secret, configMap and clientSecret" }}{{ end }}
- name: kvcluster-tls
  {{- if .configMap }}
  configMap:
    name: {{ .configMap }}
  {{- else }}
  secret:
    secretName: {{ default .clientSecret .secret }}
    defaultMode: {{ ternary "0440" "0444" (not .secret) }}
  {{- end }}
    items:
      {{- range $file := ternary (list "ca.crt" "tls.crt" "tls.key") (list "ca.crt") (ne (default "" .clientSecret) "") }}
      - key: {{ $file }}
        path: {{ $file }}
      {{- end }}
{{- end }}
{{- if dig "nodeLocal" "enabled" false . }}
- name: kvcluster-sockets
  {{- if .nodeLocal.csi }}
  csi:
    {{- toYaml (merge (dict "readOnly" true) .nodeLocal.csi) | nindent 4 }}
  {{- else }}
  hostPath:
    path: {{ required "kvcluster.nodeLocal.hostPath: give the directory that the shards' pods mount, or csi" .nodeLocal.hostPath }}
    type: Directory
  {{- end }}
{{- end }}
{{- end -}}
