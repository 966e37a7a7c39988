{{- /* What `restricted` asks of a pod. Of (root, user, group). */ -}}
{{- define "kvcluster.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 .user }}
  runAsGroup: {{ int64 .group }}
  fsGroup: {{ int64 .group }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* What `restricted` asks of a container, and a root that cannot be written. Of (user, group). */ -}}
{{- define "kvcluster.containerSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 .user }}
  runAsGroup: {{ int64 .group }}
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
{{- end -}}

{{- define "kvcluster.env" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: HOME
  value: /tmp
{{- end -}}

{{- /* Mounts that every container of ours has. Of root. */ -}}
{{- define "kvcluster.mounts" -}}
- name: config
  mountPath: /etc/kvcluster/config
  readOnly: true
- name: auth
  mountPath: /etc/kvcluster/auth
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
{{- end -}}

{{- define "kvcluster.volumes" -}}
- name: config
  configMap:
    name: {{ include "kvcluster.fullname" . }}-config
- name: auth
  secret:
    secretName: {{ include "kvcluster.authSecret" . }}
    defaultMode: 0440
    items:
      - key: {{ .Values.auth.secretKey }}
        path: secret
      - key: {{ .Values.auth.tokensKey }}
        path: tokens
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmpSize }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: 256Mi
{{- end -}}

{{- /* An HTTP probe. Of (path, port, period, failures). */ -}}
{{- define "kvcluster.probe" -}}
httpGet:
  path: {{ .path }}
  port: {{ .port }}
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
{{- range $name, $amount := default dict (index $ $kind) -}}
{{- if ne (toString $amount) "" }}{{ $_ := set $part $name $amount }}{{ end -}}
{{- end -}}
{{- if $part }}{{ $_ := set $clean $kind $part }}{{ end -}}
{{- end -}}
{{- toYaml $clean -}}
{{- end -}}

{{- /* Settings that the processes of the head run, and those of a group's shards, for annotations that restart pods. */ -}}
{{- define "kvcluster.headSettings" -}}
{{- $config := fromJson (include "kvcluster.config" .) -}}
{{- pick $config "name" "membership_ttl_ms" "stall_ms" "volume_wait_ms" "coordinator" "server" "metrics" "log" "events" "ray" | toJson | sha256sum -}}
{{- end -}}

{{- define "kvcluster.groupSettings" -}}
{{- $config := fromJson (include "kvcluster.config" .root) -}}
{{- $all := pick $config "name" "membership_ttl_ms" "stall_ms" "server" "metrics" "log" "ray" -}}
{{- $group := get $config.groups .name -}}
{{- $own := mergeOverwrite (deepCopy (default dict $config.shard)) $group.shard -}}
{{- dict "all" $all "own" $own "resources" $group.resources | toJson | sha256sum -}}
{{- end -}}
