{{/* Names and labels that several files share. Kubernetes labels a pod with its StatefulSet's name ("-server" behind this one)
and a hash of ten digits, in 63 characters: 45 are left. */}}
{{- define "microturn.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 45 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 45 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select pods: (list . "server"). They can never change. */}}
{{- define "microturn.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "microturn.labels" -}}
{{- $root := index . 0 -}}
{{ include "microturn.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end -}}

{{/* What no container here needs. */}}
{{- define "microturn.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "microturn.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* An egress rule: the cluster's name server. */}}
{{- define "microturn.nameLookup" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
  to:
    - namespaceSelector: {}
      podSelector: {matchLabels: {k8s-app: kube-dns}}
{{- end -}}

{{/* Where a pod may run: (list . "edge" .Values.edge). Unless told otherwise, its replicas keep to nodes of their own. */}}
{{- define "microturn.apart" -}}
{{- with (index . 2).nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with (index . 2).tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
{{- with (index . 2).affinity }}
  {{- toYaml . | nindent 2 }}
{{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "microturn.selector" . | nindent 14 }}
{{- end }}
{{- end -}}

{{- define "microturn.image" -}}
{{- .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion -}}
{{- end -}}

{{- define "microturn.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* A text in which one line has been put in the place of another: (list text old new). A file that says it otherwise is an error. */}}
{{- define "microturn.replaced" -}}
{{- if not (contains (index . 1) (index . 0)) }}{{ fail (printf "files/envoy.yaml has no %q" (index . 1)) }}{{ end -}}
{{- index . 0 | replace (index . 1) (index . 2) -}}
{{- end -}}

{{/* Envoy's configuration: compose's file with the chart's values. */}}
{{- define "microturn.envoy" -}}
{{- $config := .Files.Get "files/envoy.yaml" }}
{{- $tokens := .Values.edge.tokens }}
{{- $keys := "local_jwks: {filename: /etc/envoy/secrets/jwks.json}" }}
{{- if $tokens.jwksUri }}
{{- $keys = printf "remote_jwks: {http_uri: {uri: %q, cluster: identity_provider, timeout: 5s}, cache_duration: 600s, async_fetch: {}}" $tokens.jwksUri }}
{{- end }}
{{- range $old, $new := dict
  "address: server, port_value: 8001" (printf "address: %s-servers.%s.svc, port_value: 8001" (include "microturn.name" .) .Release.Namespace)
  "issuer: microturn  #" (printf "issuer: %s  #" ($tokens.issuer | quote))
  "audiences: [microturn]" (printf "audiences: %s" ($tokens.audiences | toJson))
  "local_jwks: {filename: /etc/envoy/secrets/jwks.json}" $keys
  "max_active_downstream_connections: 20000" (printf "max_active_downstream_connections: %d" (int64 .Values.edge.maxConnections))
  "max_heap_size_bytes: 805306368" (printf "max_heap_size_bytes: %d" (int64 .Values.edge.heapBytes))
}}
{{- $config = include "microturn.replaced" (list $config $old $new) }}
{{- end }}
{{- $config }}
{{- with $tokens.jwksUri }}
{{- $host := (urlParse .).host | splitList ":" }}

    - name: identity_provider
      cluster_type:
        name: envoy.cluster.dns
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.clusters.dns.v3.DnsCluster
          dns_lookup_family: V4_PREFERRED
      connect_timeout: 5s
      load_assignment:
        cluster_name: identity_provider
        endpoints:
          - lb_endpoints:
              - endpoint:
                  address: {socket_address: {address: {{ index $host 0 }}, port_value: {{ index (append $host "443") 1 }}}}
      transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
          sni: {{ index $host 0 }}
          common_tls_context:
            validation_context:
              trusted_ca: {filename: {{ $tokens.trustedCa | quote }}}
              match_typed_subject_alt_names: [{san_type: DNS, matcher: {exact: {{ index $host 0 }}}}]
{{- end }}
{{- end -}}

{{- define "microturn.snapshotClaim" -}}
{{- .Values.snapshots.existingClaim | default (printf "%s-snapshots" (include "microturn.name" .)) -}}
{{- end -}}

{{/* Environment of a server: its own address for the edge's routes, and where boto3 finds the bucket of snapshots. */}}
{{- define "microturn.serverEnv" -}}
{{- if and .Values.handOver.keySecretName .Values.edge.enabled }}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- end }}
{{- with .Values.snapshots.bucket }}
{{- if and $.Values.snapshots.enabled .url }}
{{- with .endpoint }}
- {name: AWS_ENDPOINT_URL_S3, value: {{ . | quote }}}
{{- end }}
{{- with .region }}
- {name: AWS_DEFAULT_REGION, value: {{ . | quote }}}
{{- end }}
{{- with .credentialsSecretName }}
- {name: AWS_ACCESS_KEY_ID, valueFrom: {secretKeyRef: {name: {{ . }}, key: access-key-id}}}
- {name: AWS_SECRET_ACCESS_KEY, valueFrom: {secretKeyRef: {name: {{ . }}, key: secret-access-key}}}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.server.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A setting as text: Helm reads every number as a float, and would write large ones with an exponent. */}}
{{- define "microturn.settingValue" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{- int64 . -}}{{- else -}}{{- . -}}{{- end -}}
{{- end -}}
