{{- /* Fails for values that contradict one another. */ -}}
{{- define "kvcluster.checks" -}}
{{- include "kvcluster.securityChecks" . -}}
{{- with .Values -}}
{{- if gt (len (include "kvcluster.fullname" $)) 30 -}}
{{- fail (printf "fullnameOverride has more than 30 characters: %s" .fullnameOverride) -}}
{{- end -}}
{{- if eq .mode "join" -}}
{{- if not .join.address -}}
{{- fail "mode join needs join.address: HOST:PORT of the head of the RayCluster" -}}
{{- end -}}
{{- if not .join.headSelector -}}
{{- fail "mode join needs join.headSelector, by which the Service finds the coordinator on the RayCluster's head" -}}
{{- end -}}
{{- if and .auth.severalTenants (not .join.allowSeveralTenants) -}}
{{- fail "auth.severalTenants in mode join: other jobs of that Ray could read the pages of all tenants. Set join.allowSeveralTenants to accept that" -}}
{{- end -}}
{{- if and (not .join.tokenSecretName) (not .join.allowUnauthenticatedRay) -}}
{{- fail "mode join needs join.tokenSecretName, the Secret with Ray's token; set join.allowUnauthenticatedRay to join a Ray that asks for none" -}}
{{- end -}}
{{- if .redis.address -}}
{{- fail "redis.address is of the cluster's own Ray; in mode join the RayCluster keeps its own state" -}}
{{- end -}}
{{- else if or .join.address .join.tokenSecretName -}}
{{- fail (printf "join.address and join.tokenSecretName need mode join, not %s" .mode) -}}
{{- end -}}
{{- if and (include "kvcluster.ownShards" $) (dig "limits" "memory" "" (default dict .head.resources)) -}}
{{- $limit := include "kvcluster.quantity" (dict "value" .head.resources.limits.memory "name" "head.resources.limits.memory") | int64 -}}
{{- $needs := include "kvcluster.headNeeds" $ | int64 -}}
{{- if lt $limit $needs -}}
{{- fail (printf "head.resources.limits.memory is %v, and the index of all blocks that the tiers hold needs %s: raise it, or set head.blockBytes, which is %v, to the size of your blocks" .head.resources.limits.memory (include "kvcluster.mebibytes" $needs) .head.blockBytes) -}}
{{- end -}}
{{- end -}}
{{- if eq .mode "node-local" -}}
{{- if .auth.severalTenants -}}
{{- fail "auth.severalTenants in mode node-local: readers of shared memory map the pages of all tenants. Install a release for each tenant, which has a directory of its own, or take mode cluster" -}}
{{- end -}}
{{- if and (not .nodeLocal.csi) .nodeLocal.hostPath.prepare (kindIs "invalid" .runAsUser) -}}
{{- fail "nodeLocal.hostPath.prepare needs runAsUser, to whom the directory is given: set it, or prepare the directory on the nodes and set nodeLocal.hostPath.prepare: false" -}}
{{- end -}}
{{- if and .nodeLocal.csi (not .nodeLocal.csi.driver) -}}
{{- fail "nodeLocal.csi needs driver: the name of the CSI driver" -}}
{{- end -}}
{{- end -}}
{{- if and .monitoring.podMonitor .monitoring.serviceMonitor -}}
{{- fail "monitoring.podMonitor and monitoring.serviceMonitor exclude one another: every series would be there twice" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Whether shards have pods of their own, of the chart's: in the modes cluster and node-local; "" if not. */ -}}
{{- define "kvcluster.ownShards" -}}
{{- if has .Values.mode (list "cluster" "node-local") }}true{{ end -}}
{{- end -}}
