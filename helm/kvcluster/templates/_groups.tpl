{{- /* Every group of shards as JSON: what it has of `shards` and of its own, and what follows from that: pools, memory,
seconds. */ -}}
{{- define "kvcluster.groups" -}}
{{- $root := . -}}
{{- $groups := dict -}}
{{- $given := default (dict "shard" dict) .Values.groups -}}
{{- if eq .Values.mode "sidecar" }}{{ $given = default (dict "sidecar" dict) .Values.groups }}{{ end -}}
{{- range $name, $own := $given -}}
{{- $group := mergeOverwrite (deepCopy $root.Values.shards) (deepCopy (default dict $own)) -}}
{{- $_ := set $groups $name (include "kvcluster.group" (dict "root" $root "name" $name "group" $group) | fromJson) -}}
{{- end -}}
{{- $groups | toJson -}}
{{- end -}}

{{- /* Settings of a shard as JSON, with the names of today: `device_bytes` is the old name of `ram_bytes`, which has a
default, so the old one wins. */ -}}
{{- define "kvcluster.shardSettings" -}}
{{- $shard := deepCopy . -}}
{{- if hasKey $shard "device_bytes" -}}
{{- $shard = set (omit $shard "device_bytes") "ram_bytes" $shard.device_bytes -}}
{{- end -}}
{{- $shard | toJson -}}
{{- end -}}

{{- define "kvcluster.group" -}}
{{- $at := printf "groups.%s" .name -}}
{{- $values := .root.Values -}}
{{- $group := .group -}}
{{- $resources := default dict $group.resources -}}
{{- $_ := set $group "resources" (dict "requests" (default dict $resources.requests) "limits" (default dict $resources.limits)) -}}
{{- $_ := set $group "shard" (include "kvcluster.shardSettings" (default dict $group.shard) | fromJson) -}}
{{- $base := include "kvcluster.shardSettings" (default dict $values.config.shard) | fromJson -}}
{{- $tiers := mergeOverwrite $base (deepCopy $group.shard) -}}
{{- $count := int64 $group.perPod -}}
{{- $ram := include "kvcluster.bytes" (dict "value" (dig "ram_bytes" "1GiB" $tiers) "name" (printf "%s.shard.ram_bytes" $at)) | int64 -}}
{{- $host := include "kvcluster.bytes" (dict "value" (dig "host_bytes" "0" $tiers) "name" (printf "%s.shard.host_bytes" $at)) | int64 -}}
{{- $disk := include "kvcluster.bytes" (dict "value" (dig "disk_bytes" "0" $tiers) "name" (printf "%s.shard.disk_bytes" $at)) | int64 -}}
{{- $gpu := include "kvcluster.bytes" (dict "value" (dig "gpu_bytes" "0" $tiers) "name" (printf "%s.shard.gpu_bytes" $at)) | int64 -}}
{{- $pools := mul (add $ram $host) $count -}}
{{- $memory := include "kvcluster.memory" (dict "pools" $pools "shards" $count) | int64 -}}
{{- $pages := default (ternary "save" "drain" (gt $disk 0)) $group.stop.pages -}}
{{- $drainRate := include "kvcluster.bytes" (dict "value" $group.stop.drainRate "name" (printf "%s.stop.drainRate" $at)) | int64 -}}
{{- $saveRate := include "kvcluster.bytes" (dict "value" $group.stop.saveRate "name" (printf "%s.stop.saveRate" $at)) | int64 -}}
{{- if or (lt $drainRate 1) (lt $saveRate 1) }}{{ fail (printf "%s.stop: drainRate and saveRate must be at least 1" $at) }}{{ end -}}
{{- $most := int64 $group.stop.maxSeconds -}}
{{- $fixed := 45 -}}
{{- if gt (int64 $group.stop.noticeSeconds) 0 -}}
{{- $most = min $most (max 1 (sub (int64 $group.stop.noticeSeconds) 10)) -}}
{{- $fixed = 10 -}}
{{- end -}}
{{- $drain := 0 -}}
{{- $save := 0 -}}
{{- if eq $pages "drain" -}}
{{- $drain = min $most (max 10 (include "kvcluster.divUp" (dict "of" $pools "by" $drainRate) | int64)) -}}
{{- end -}}
{{- if and (eq $pages "save") (gt $disk 0) -}}
{{- $save = min $most (max 10 (include "kvcluster.divUp" (dict "of" $pools "by" $saveRate) | int64)) -}}
{{- end -}}
{{- $stopMs := mul $save 1000 -}}
{{- if and (gt $disk 0) (hasKey $tiers "stop_ms") -}}
{{- $stopMs = int64 $tiers.stop_ms -}}
{{- $save = include "kvcluster.divUp" (dict "of" $stopMs "by" 1000) | int64 -}}
{{- end -}}
{{- $diskNeeds := add (mul $disk $count) (div (mul $disk $count) 16) 268435456 -}}
{{- $checks := include "kvcluster.groupChecks" (dict "at" $at "name" .name "root" .root "group" $group "memory" $memory "pools" $pools "disk" $disk "host" $host "gpuBytes" $gpu "diskNeeds" $diskNeeds "pages" $pages) -}}
{{- $group = merge (dict
    "tiers" $tiers "pools" $pools "disk" (dict "bytes" $disk "size" (default (include "kvcluster.mebibytes" $diskNeeds) $group.disk.size))
    "resource" (printf "kvcluster_shard_%s" (.name | replace "-" "_"))
    "limit" (default (printf "%dMi" (div $memory 1048576)) $group.resources.limits.memory)
    "numGpus" (include "kvcluster.gpusOfShard" $group | float64) "pages" $pages "leaveSeconds" $drain "saveSeconds" $save "stopMs" $stopMs
    "keeps" (mul (add $drain $save) (ternary $saveRate $drainRate (eq $pages "save")))
    "graceSeconds" (add $drain $save $fixed)
  ) $group -}}
{{- $group | toJson -}}
{{- end -}}

{{- /* The GPUs of its pod that each shard claims: whole ones, or a part of one. */ -}}
{{- define "kvcluster.gpusOfShard" -}}
{{- divf (floor (mulf (divf .gpu.count .perPod) 10000)) 10000 -}}
{{- end -}}

{{- /* Fails for a group that cannot work. */ -}}
{{- define "kvcluster.groupChecks" -}}
{{- $at := .at -}}
{{- with .group -}}
{{- if has $.name (list "head" "redis" "join") -}}
{{- fail (printf "%s: this name is taken by the chart; choose another" $at) -}}
{{- end -}}
{{- if gt (len (printf "%s-%s" (include "kvcluster.fullname" $.root) $.name)) 52 -}}
{{- fail (printf "%s: the StatefulSet's name would have more than 52 characters; shorten it or fullnameOverride" $at) -}}
{{- end -}}
{{- if and (gt (int64 .gpu.count) 0) (not .gpu.resource) -}}
{{- fail (printf "%s.gpu.count is %d without %s.gpu.resource: name the resource by which nodes offer GPUs, such as nvidia.com/gpu" $at (int64 .gpu.count) $at) -}}
{{- end -}}
{{- if and .gpu.resource (lt (int64 .gpu.count) 1) -}}
{{- fail (printf "%s.gpu.resource is %s without %s.gpu.count: say how many a pod gets" $at .gpu.resource $at) -}}
{{- end -}}
{{- if and (gt (int64 .gpu.count) 0) (lt (int64 $.gpuBytes) 1) -}}
{{- fail (printf "%s.gpu.count is %d, and shards without a pool there do not use GPUs: set %s.shard.gpu_bytes, or leave the GPUs to engines" $at (int64 .gpu.count) $at) -}}
{{- end -}}
{{- if gt (int64 .gpu.count) (int64 .perPod) -}}
{{- fail (printf "%s.gpu.count is %d for %d shard(s) in a pod: a shard uses one GPU; raise %s.perPod or lower the count" $at (int64 .gpu.count) (int64 .perPod) $at) -}}
{{- end -}}
{{- if and (gt (int64 $.disk) 0) (lt (int64 $.host) 1) -}}
{{- fail (printf "%s.shard.disk_bytes needs %s.shard.host_bytes: pages reach the disk from the host tier, and return through it" $at $at) -}}
{{- end -}}
{{- if and (gt (int64 $.gpuBytes) 0) (lt (int64 $.host) 1) -}}
{{- fail (printf "%s.shard.gpu_bytes needs %s.shard.host_bytes: readers of other machines get copies of its pages there" $at $at) -}}
{{- end -}}
{{- if and (gt (int64 $.disk) 0) (eq $.root.Values.mode "node-local") -}}
{{- fail (printf "%s.shard.disk_bytes in mode node-local: a DaemonSet's pods have no volumes of their own; use mode cluster for a disk tier" $at) -}}
{{- end -}}
{{- if and (gt (int64 .updateStrategy.partition) 0) (eq $.root.Values.mode "node-local") -}}
{{- fail (printf "%s.updateStrategy.partition in mode node-local: a DaemonSet's pods have no ordinals" $at) -}}
{{- end -}}
{{- if and (eq $.pages "save") (lt (int64 $.disk) 1) -}}
{{- fail (printf "%s.stop.pages is save without %s.shard.disk_bytes: there is no volume to save to" $at $at) -}}
{{- end -}}
{{- if .resources.limits.memory -}}
{{- $limit := include "kvcluster.quantity" (dict "value" .resources.limits.memory "name" (printf "%s.resources.limits.memory" $at)) | int64 -}}
{{- if lt $limit (int64 $.memory) -}}
{{- fail (printf "%s.resources.limits.memory is %s, and %d shard(s) with %d MiB of pools need %d Mi: lower ram_bytes or host_bytes, or raise the limit" $at .resources.limits.memory (int64 .perPod) (div (int64 $.pools) 1048576) (div (int64 $.memory) 1048576)) -}}
{{- end -}}
{{- end -}}
{{- if .disk.size -}}
{{- $size := include "kvcluster.quantity" (dict "value" .disk.size "name" (printf "%s.disk.size" $at)) | int64 -}}
{{- if lt $size (int64 $.diskNeeds) -}}
{{- fail (printf "%s.disk.size is %s, and the disk tier of a pod needs %s" $at .disk.size (include "kvcluster.mebibytes" $.diskNeeds)) -}}
{{- end -}}
{{- end -}}
{{- with .podDisruptionBudget -}}
{{- if and .enabled (eq (kindIs "invalid" .maxUnavailable) (kindIs "invalid" .minAvailable)) -}}
{{- fail (printf "%s.podDisruptionBudget takes one of maxUnavailable and minAvailable; set the other to null" $at) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The bytes of memory that the head needs: its processes, and 400 for each block of which a page may lie in a tier; below
RAM pages take half of a block or less (docs/kubernetes.md). */ -}}
{{- define "kvcluster.headNeeds" -}}
{{- $block := include "kvcluster.bytes" (dict "value" .Values.head.blockBytes "name" "head.blockBytes") | int64 -}}
{{- if lt $block 1024 }}{{ fail "head.blockBytes must be at least 1024" }}{{ end -}}
{{- $bytes := 0 -}}
{{- range $name, $group := fromJson (include "kvcluster.groups" .) -}}
{{- $pods := 1 -}}
{{- if eq $.Values.mode "node-local" }}{{ $pods = int64 $.Values.nodeLocal.expectedNodes }}
{{- else if not (kindIs "invalid" $group.replicas) }}{{ $pods = int64 $group.replicas }}{{ end -}}
{{- $bytes = add $bytes (mul $pods (add (int64 $group.pools) (mul 2 (int64 $group.disk.bytes) (int64 $group.perPod)))) -}}
{{- end -}}
{{- add 805306368 (mul 400 (div $bytes $block)) -}}
{{- end -}}

{{- /* The largest number of shards in a pod of any group. */ -}}
{{- define "kvcluster.mostPerPod" -}}
{{- $most := 1 -}}
{{- range $name, $group := fromJson (include "kvcluster.groups" .) }}{{ $most = max $most (int64 $group.perPod) }}{{ end -}}
{{- $most -}}
{{- end -}}
