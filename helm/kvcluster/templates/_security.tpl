{{- /* Encryption: which certificates there are, where they lie, and what finds them. */ -}}

{{- /* Whether the processes of the cluster speak TLS; "" if not. */ -}}
{{- define "kvcluster.tls" -}}
{{- if eq .Values.security.encryption "tls" }}true{{ end -}}
{{- end -}}

{{- /* Where the certificate of a process is in its container. */ -}}
{{- define "kvcluster.tlsDir" -}}
/etc/kvcluster/tls
{{- end -}}

{{- /* The Secret with the certificate for a role. Of (root, role). */ -}}
{{- define "kvcluster.tlsSecret" -}}
{{- default (printf "%s-%s-tls" (include "kvcluster.fullname" .root) .role) (get .root.Values.security.existingSecrets .role) -}}
{{- end -}}

{{- /* The name by which shards are verified, and every process of which metrics are read: that of the Service of all pods.
One name serves all: which role a process has is said by the URI of its certificate, and addresses of pods are not known
when a certificate is made. */ -}}
{{- define "kvcluster.nodesName" -}}
{{ include "kvcluster.fullname" . }}-nodes.{{ .Release.Namespace }}.svc
{{- end -}}

{{- /* The names of the head's Service by which it is reached, the advertised one first. */ -}}
{{- define "kvcluster.headNames" -}}
{{- $service := include "kvcluster.headService" . -}}
{{- $names := list (include "kvcluster.headHost" .) (printf "%s.%s.svc" $service .Release.Namespace) (printf "%s.%s" $service .Release.Namespace) $service -}}
{{- concat $names (default list .Values.security.certManager.dnsNames) | uniq | toJson -}}
{{- end -}}

{{- define "kvcluster.tlsVolume" -}}
- name: tls
  secret:
    secretName: {{ include "kvcluster.tlsSecret" . }}
    # The program refuses a key that every user can read; the group is the pod's fsGroup.
    defaultMode: 0440
    items:
      {{- range $file := list "ca.crt" "tls.crt" "tls.key" }}
      - key: {{ $file }}
        path: {{ $file }}
      {{- end }}
{{- end -}}

{{- /* A directory and not single files (subPath), which would never change. */ -}}
{{- define "kvcluster.tlsMount" -}}
- name: tls
  mountPath: {{ include "kvcluster.tlsDir" . }}
  readOnly: true
{{- end -}}

{{- /* The certificates that cert-manager makes, as JSON: by role, the URI, DNS names and whether it serves. */ -}}
{{- define "kvcluster.certificates" -}}
{{- $nodes := include "kvcluster.nodesName" . -}}
{{- $names := append (include "kvcluster.headNames" . | fromJsonArray) $nodes -}}
{{- $all := dict "coordinator" (dict "uri" "coordinator" "dnsNames" $names "serves" true) "shard" (dict "uri" "shard" "dnsNames" (list $nodes) "serves" true) -}}
{{- range $client := default list .Values.security.certManager.clients -}}
{{- $uri := ternary (printf "tenant/%s" (trimPrefix "tenant-" $client)) $client (hasPrefix "tenant-" $client) -}}
{{- $_ := set $all $client (dict "uri" $uri "dnsNames" list "serves" false) -}}
{{- end -}}
{{- $all | toJson -}}
{{- end -}}

{{- /* Fails for settings of encryption that contradict one another. */ -}}
{{- define "kvcluster.securityChecks" -}}
{{- $issuer := .Values.security.certManager.issuerRef.name -}}
{{- with .Values.security -}}
{{- $given := list -}}
{{- range $role := list "coordinator" "shard" -}}
{{- if get $.Values.security.existingSecrets $role }}{{ $given = append $given $role }}{{ end -}}
{{- end -}}
{{- if include "kvcluster.tls" $ -}}
{{- if and (not $issuer) (ne (len $given) 2) -}}
{{- fail "security.encryption tls needs certificates: security.certManager.issuerRef.name, by whose issuer cert-manager makes them, or both of security.existingSecrets.coordinator and .shard" -}}
{{- end -}}
{{- if and $issuer $given -}}
{{- fail "security.certManager.issuerRef.name and security.existingSecrets exclude one another: name the issuer, or the Secrets" -}}
{{- end -}}
{{- if and .certManager.clients (not $issuer) -}}
{{- fail "security.certManager.clients needs security.certManager.issuerRef.name" -}}
{{- end -}}
{{- if and $issuer (le (trimSuffix "h" .certManager.duration | int64) (trimSuffix "h" .certManager.renewBefore | int64)) -}}
{{- fail (printf "security.certManager.renewBefore is %s, and a certificate is valid for %s: it would be renewed without end" .certManager.renewBefore .certManager.duration) -}}
{{- end -}}
{{- else if or $issuer $given .clientCertificates .certManager.clients -}}
{{- fail (printf "security.certManager, security.existingSecrets and security.clientCertificates have no meaning with security.encryption %s: set it to tls" .encryption) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* What NOTES say of encryption. */ -}}
{{- define "kvcluster.encryptionNotes" -}}
{{- $ports := fromJson (include "kvcluster.ports" .) -}}
{{- $policies := ternary "The policies of this release let no others in, where the network plugin carries them out" "networkPolicy.enabled is false, so this release keeps nobody from them" .Values.networkPolicy.enabled -}}
{{- if include "kvcluster.tls" . -}}
security.encryption is tls: engines, the head and shards speak TLS, and so do metrics and probes. An engine's pod needs the file {{ .Values.connection.tlsDir }}/ca.crt{{ if .Values.security.clientCertificates }}, and tls.crt and tls.key of a certificate for its tenant beside it{{ end }}, and the environment of the ConfigMap {{ include "kvcluster.fullname" . }}-connection (envFrom).
{{- if eq .Values.security.rayEncryption "network" }}
security.rayEncryption is network: that the network encrypts what Ray's processes send is not checked.
{{- else }}
security.rayEncryption is none: what Ray's processes send one another (ports {{ $ports.gcs }}, {{ join "-" $ports.rayNode }}, {{ join "-" $ports.rayWorkers }}) is not encrypted, their token in it. Whoever reads the network between pods can read that token, and whoever has it and reaches these ports runs code as the cluster. {{ $policies }}.
{{- end }}
{{- if include "kvcluster.redisAddress" . }}
The head's connection to its Redis is not encrypted, the password in it.
{{- end }}
{{- else if eq .Values.security.encryption "network" -}}
security.encryption is network: this release encrypts nothing, and does not check that the network between pods does.
{{- else -}}
security.encryption is none: nothing between pods is encrypted. Whoever reads the network there reads tokens and pages, and with Ray's token runs code as the cluster on Ray's ports. {{ $policies }}. Set security.encryption to tls, or to network if the network encrypts.
{{- end -}}
{{- end -}}
