{{- define "kvcluster.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* Labels of objects. */ -}}
{{- define "kvcluster.labels" -}}
{{ include "kvcluster.releaseLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Labels that no upgrade changes, for selectors, pods and volumes. */ -}}
{{- define "kvcluster.releaseLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* What tells this release from others in one Prometheus, and names it in alerts. */ -}}
{{- define "kvcluster.releaseName" -}}
{{ .Release.Namespace }}/{{ .Release.Name }}
{{- end -}}

{{- /* What every pod of the cluster has, those of sidecars among them: the policies let them reach one another. */ -}}
{{- define "kvcluster.nodeLabel" -}}
kvcluster-node: {{ include "kvcluster.fullname" . }}
{{- end -}}

{{- define "kvcluster.headLabels" -}}
{{ include "kvcluster.releaseLabels" . }}
app.kubernetes.io/component: head
{{- end -}}

{{- /* Of (root, group). */ -}}
{{- define "kvcluster.groupLabels" -}}
{{ include "kvcluster.releaseLabels" .root }}
app.kubernetes.io/component: shard
kvcluster-group: {{ .group }}
{{- end -}}

{{- define "kvcluster.headService" -}}
{{ include "kvcluster.fullname" . }}-head
{{- end -}}

{{- /* The name at which everything reaches the head. */ -}}
{{- define "kvcluster.headHost" -}}
{{- $name := printf "%s.%s.svc" (include "kvcluster.headService" .) .Release.Namespace -}}
{{- with .Values.clusterDomain }}{{ printf "%s.%s" $name . }}{{ else }}{{ $name }}{{ end -}}
{{- end -}}

{{- define "kvcluster.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvcluster.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kvcluster.authSecret" -}}
{{- default (printf "%s-auth" (include "kvcluster.fullname" .)) .Values.auth.secretName -}}
{{- end -}}

{{- define "kvcluster.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ include "kvcluster.repository" (dict "root" $ "repository" .repository) }}@{{ .digest }}
{{- else -}}
{{ include "kvcluster.repository" (dict "root" $ "repository" .repository) }}:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A repository at `global.imageRegistry`, by which a chart above this one names the registry of all of its charts, in
place of its own. Its own is a first part with a dot or a port, or localhost. Of (root, repository). */ -}}
{{- define "kvcluster.repository" -}}
{{- $registry := dig "imageRegistry" "" (default dict .root.Values.global) -}}
{{- if $registry -}}
{{ printf "%s/%s" (trimSuffix "/" $registry) (regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" .repository "") }}
{{- else -}}
{{ .repository }}
{{- end -}}
{{- end -}}

{{- /* Whether the chart runs a Redis; "" if not. In mode join the RayCluster keeps its own state. */ -}}
{{- define "kvcluster.ownRedis" -}}
{{- if and .Values.redis.enabled (not .Values.redis.address) (ne .Values.mode "join") }}true{{ end -}}
{{- end -}}

{{- /* The Secret with the password of the Redis; "" if the password is derived from the cluster's secret. */ -}}
{{- define "kvcluster.redisSecret" -}}
{{- if .Values.redis.secretName -}}
{{ .Values.redis.secretName }}
{{- else if .Values.redis.address -}}
{{ include "kvcluster.authSecret" . }}
{{- end -}}
{{- end -}}

{{- /* HOST:PORT of the Redis of the head; "" for none. */ -}}
{{- define "kvcluster.redisAddress" -}}
{{- if include "kvcluster.ownRedis" . -}}
{{- $name := printf "%s-redis.%s.svc" (include "kvcluster.fullname" .) .Release.Namespace -}}
{{- with .Values.clusterDomain }}{{ printf "%s.%s:6379" $name . }}{{ else }}{{ printf "%s:6379" $name }}{{ end -}}
{{- else -}}
{{ default "" .Values.redis.address }}
{{- end -}}
{{- end -}}

{{- /* The image of the Redis: HOST/REPOSITORY:TAG@DIGEST in any of its forms. */ -}}
{{- define "kvcluster.redisImage" -}}
{{- include "kvcluster.repository" (dict "root" . "repository" .Values.redis.image) -}}
{{- end -}}

{{- define "kvcluster.redisLabels" -}}
{{ include "kvcluster.releaseLabels" . }}
app.kubernetes.io/component: redis
{{- end -}}

{{- define "kvcluster.joinLabels" -}}
{{ include "kvcluster.releaseLabels" . }}
app.kubernetes.io/component: join
{{- end -}}
