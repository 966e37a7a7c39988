{{- /* Arithmetic of bytes. Numbers are whole; what is divided is rounded up unless it says otherwise. */ -}}

{{- /* Bytes of a size as kvcluster reads it: "20GiB", "1.5 GB", "4096" or a number. Of (value, name). */ -}}
{{- define "kvcluster.bytes" -}}
{{- if kindIs "string" .value -}}
{{- $number := regexFind "^ *[0-9]+(\\.[0-9]+)?" .value | trim -}}
{{- $unit := regexReplaceAll "^ *[0-9]+(\\.[0-9]+)?" .value "" | trim | lower -}}
{{- $units := dict "" 1 "b" 1 "kib" 1024 "mib" 1048576 "gib" 1073741824 "tib" 1099511627776 "kb" 1000 "mb" 1000000 "gb" 1000000000 -}}
{{- if or (not $number) (not (hasKey $units $unit)) -}}
{{- fail (printf "%s: %q is no size; write bytes, or a number with KiB, MiB, GiB or TiB" .name .value) -}}
{{- end -}}
{{- include "kvcluster.scaled" (dict "number" $number "unit" (get $units $unit)) -}}
{{- else -}}
{{- int64 .value -}}
{{- end -}}
{{- end -}}

{{- /* Bytes of a quantity of Kubernetes: "4Gi", "512M", a number. Of (value, name). */ -}}
{{- define "kvcluster.quantity" -}}
{{- if kindIs "string" .value -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" .value -}}
{{- $unit := regexReplaceAll "^[0-9]+(\\.[0-9]+)?" .value "" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- if or (not $number) (not (hasKey $units $unit)) -}}
{{- fail (printf "%s: %q is no quantity of bytes, such as 40Gi" .name .value) -}}
{{- end -}}
{{- include "kvcluster.scaled" (dict "number" $number "unit" (get $units $unit)) -}}
{{- else -}}
{{- int64 .value -}}
{{- end -}}
{{- end -}}

{{- /* A decimal number in text times a whole one, rounded down. The number has at most six digits after the point. */ -}}
{{- define "kvcluster.scaled" -}}
{{- $whole := regexFind "^[0-9]+" .number | trimPrefix "+" -}}
{{- $whole = regexReplaceAll "^0+([0-9])" $whole "${1}" -}}
{{- $total := mul (int64 $whole) .unit -}}
{{- $fraction := regexFind "\\.[0-9]+$" .number | trimPrefix "." -}}
{{- if $fraction -}}
{{- $scale := 1 -}}
{{- range until (len $fraction) }}{{ $scale = mul $scale 10 }}{{ end -}}
{{- $digits := regexReplaceAll "^0+([0-9])" $fraction "${1}" -}}
{{- $total = add $total (div (mul (int64 $digits) .unit) $scale) -}}
{{- end -}}
{{- $total -}}
{{- end -}}

{{- /* Division rounded up. Of (of, by). */ -}}
{{- define "kvcluster.divUp" -}}
{{- div (add .of (sub .by 1)) .by -}}
{{- end -}}

{{- /* Bytes as a quantity in whole Mi, rounded up. */ -}}
{{- define "kvcluster.mebibytes" -}}
{{- include "kvcluster.divUp" (dict "of" . "by" 1048576) }}Mi
{{- end -}}

{{- /* The least limit of memory of a node with so many shards and bytes of pools: the pools, 512 MiB for Ray, 256 MiB for
each shard and for the node's own process, and a tenth of the whole on top (kvcluster/actors/node_memory.py). Of (pools,
shards). */ -}}
{{- define "kvcluster.memory" -}}
{{- $needs := add .pools 536870912 (mul (add .shards 1) 268435456) -}}
{{- $limit := add $needs (include "kvcluster.divUp" (dict "of" $needs "by" 9) | int64) 1 -}}
{{- mul (include "kvcluster.divUp" (dict "of" $limit "by" 1048576) | int64) 1048576 -}}
{{- end -}}
