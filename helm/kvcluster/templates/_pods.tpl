{{- /* What `restricted` asks of a pod. Of (root, user, group). */ -}}
{{- define "kvcluster.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- include "kvcluster.user" . | nindent 2 }}
  {{- if not (kindIs "invalid" .group) }}
  fsGroup: {{ int64 .group }}
  {{- end }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with concat (default list .root.Values.imagePullSecrets) (include "kvcluster.globalPullSecrets" .root | fromJsonArray) | uniq }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* The user and group, each left out where it is null: OpenShift gives pods one of their project. Of (user, group). */ -}}
{{- define "kvcluster.user" -}}
{{- if not (kindIs "invalid" .user) }}
runAsUser: {{ int64 .user }}
{{- end }}
{{- if not (kindIs "invalid" .group) }}
runAsGroup: {{ int64 .group }}
{{- end }}
{{- end -}}

{{- /* Secrets of `global.imagePullSecrets`, by which a chart above this one gives them to all of its charts: names, or
objects with a name. */ -}}
{{- define "kvcluster.globalPullSecrets" -}}
{{- $secrets := list -}}
{{- range default list (dig "imagePullSecrets" list (default dict .Values.global)) -}}
{{- $secrets = append $secrets (ternary (dict "name" .) . (kindIs "string" .)) -}}
{{- end -}}
{{- $secrets | toJson -}}
{{- end -}}

{{- /* What `restricted` asks of a container, and a root that cannot be written. Of (user, group). */ -}}
{{- define "kvcluster.containerSecurity" -}}
securityContext:
  runAsNonRoot: true
  {{- include "kvcluster.user" . | nindent 2 }}
  privileged: false
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- /* Where pods run. */ -}}
{{- define "kvcluster.placement" -}}
{{- range $field := list "nodeSelector" "tolerations" "affinity" -}}
{{- with index $ $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end -}}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end -}}
{{- with .schedulerName }}
schedulerName: {{ . }}
{{- end -}}
{{- end -}}

{{- /* Annotations of a pod: the chart's own, over which those of the values win. Of (own, given). */ -}}
{{- define "kvcluster.annotations" -}}
{{- toYaml (mergeOverwrite (deepCopy .own) (default dict .given)) -}}
{{- end -}}

{{- define "kvcluster.podEnv" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: HOME
  value: /tmp
{{- end -}}

{{- define "kvcluster.env" -}}
{{ include "kvcluster.podEnv" . }}
{{ include "kvcluster.connectionEnv" . }}
{{- end -}}

{{- /* Of containers that have the certificate mounted, which this names. */ -}}
{{- define "kvcluster.connectionEnv" -}}
# For commands in the container, such as `kubectl exec POD -- kvcluster status`.
- name: KVCLUSTER_ENCRYPTION
  value: {{ .Values.security.encryption }}
{{- if include "kvcluster.tls" . }}
- name: KVCLUSTER_CA_FILE
  value: {{ include "kvcluster.tlsDir" . }}/ca.crt
- name: KVCLUSTER_SERVER_NAME
  value: {{ include "kvcluster.headHost" . }}
{{- if .Values.security.clientCertificates }}
- name: KVCLUSTER_CERT_FILE
  value: {{ include "kvcluster.tlsDir" . }}/tls.crt
- name: KVCLUSTER_KEY_FILE
  value: {{ include "kvcluster.tlsDir" . }}/tls.key
{{- end }}
{{- end }}
{{- end -}}

{{- /* Mounts that every container of ours has. Of root. */ -}}
{{- define "kvcluster.mounts" -}}
- name: config
  mountPath: /etc/kvcluster/config
  readOnly: true
- name: auth
  mountPath: /etc/kvcluster/auth
  readOnly: true
{{- if include "kvcluster.tls" . }}
{{ include "kvcluster.tlsMount" . }}
{{- end }}
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
{{- end -}}

{{- /* Volumes of these mounts. Of (root, role): of the certificate. */ -}}
{{- define "kvcluster.volumes" -}}
{{- $role := .role -}}
{{- with .root -}}
- name: config
  configMap:
    name: {{ include "kvcluster.fullname" . }}-config
{{- if include "kvcluster.tls" . }}
{{ include "kvcluster.tlsVolume" (dict "root" . "role" $role) }}
{{- end }}
- name: auth
  secret:
    secretName: {{ include "kvcluster.authSecret" . }}
    defaultMode: 0440
    items:
      {{- include "kvcluster.authItems" . | nindent 6 }}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmpSize }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: 256Mi
{{- end -}}
{{- end -}}

{{- /* The files of the Secret of `auth`. */ -}}
{{- define "kvcluster.authItems" -}}
- key: {{ .Values.auth.secretKey }}
  path: secret
- key: {{ .Values.auth.tokensKey }}
  path: tokens
{{- with .Values.auth.quotasKey }}
- key: {{ . }}
  path: quotas
{{- end }}
{{- end -}}

{{- /* An HTTP probe, with tls an HTTPS one, of which the kubelet verifies no certificate. Of (root, path, port, period,
failures). */ -}}
{{- define "kvcluster.probe" -}}
httpGet:
  path: {{ .path }}
  port: {{ .port }}
  {{- if include "kvcluster.tls" .root }}
  scheme: HTTPS
  {{- end }}
periodSeconds: {{ .period }}
timeoutSeconds: 5
failureThreshold: {{ .failures }}
{{- end -}}

{{- define "kvcluster.configPath" -}}
/etc/kvcluster/config/cluster.toml
{{- end -}}

{{- /* Requests and limits; a limit of "" is left out. */ -}}
{{- define "kvcluster.resources" -}}
{{- $clean := dict -}}
{{- range $kind := list "requests" "limits" -}}
{{- $part := dict -}}
{{- range $name, $amount := default dict (get (default dict $) $kind) -}}
{{- if not (or (kindIs "invalid" $amount) (eq (toString $amount) "")) }}{{ $_ := set $part $name $amount }}{{ end -}}
{{- end -}}
{{- if $part }}{{ $_ := set $clean $kind $part }}{{ end -}}
{{- end -}}
{{- toYaml $clean -}}
{{- end -}}

{{- /* Settings that the processes of the head run, and those of a group's shards, for annotations that restart pods. */ -}}
{{- define "kvcluster.headSettings" -}}
{{- $config := fromJson (include "kvcluster.config" .) -}}
{{- pick $config "name" "membership_ttl_ms" "stall_ms" "volume_wait_ms" "coordinator" "server" "security" "metrics" "log" "events" "ray" | toJson | sha256sum -}}
{{- end -}}

{{- define "kvcluster.groupSettings" -}}
{{- $config := fromJson (include "kvcluster.config" .root) -}}
{{- $all := pick $config "name" "membership_ttl_ms" "stall_ms" "server" "security" "metrics" "log" "ray" -}}
{{- $group := get $config.groups .name -}}
{{- $own := mergeOverwrite (deepCopy (default dict $config.shard)) $group.shard -}}
{{- dict "all" $all "own" $own "resources" $group.resources | toJson | sha256sum -}}
{{- end -}}

{{- /* Where the directory of sockets is in the pods of shards and of engines, in mode node-local. */ -}}
{{- define "kvcluster.socketDir" -}}
/var/run/kvcluster
{{- end -}}

{{- define "kvcluster.socketVolume" -}}
- name: sockets
  {{- if .Values.nodeLocal.csi }}
  csi:
    {{- toYaml .Values.nodeLocal.csi | nindent 4 }}
  {{- else }}
  hostPath:
    path: {{ default (printf "/run/kvcluster/%s-%s" .Release.Namespace (include "kvcluster.fullname" .)) .Values.nodeLocal.hostPath.path }}
    type: {{ ternary "DirectoryOrCreate" "Directory" .Values.nodeLocal.hostPath.prepare }}
  {{- end }}
{{- end -}}

{{- /* Gives the directory of sockets to the shards' user and the engines' group, who may search it and not write. */ -}}
{{- define "kvcluster.socketPreparation" -}}
- name: prepare-sockets
  image: {{ include "kvcluster.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [sh, -ec]
  args:
    - |
      chown {{ int64 .Values.runAsUser }}:{{ int64 .Values.nodeLocal.group }} {{ include "kvcluster.socketDir" . }}
      chmod 2750 {{ include "kvcluster.socketDir" . }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  securityContext:
    runAsNonRoot: false
    runAsUser: 0
    runAsGroup: 0
    privileged: false
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      add: [CHOWN, FOWNER, FSETID]
    seccompProfile:
      type: RuntimeDefault
  volumeMounts:
    - name: sockets
      mountPath: {{ include "kvcluster.socketDir" . }}
{{- end -}}
