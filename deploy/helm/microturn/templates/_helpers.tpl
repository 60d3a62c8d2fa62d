{{/* Names and labels that several files share. */}}
{{- define "microturn.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
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

{{- define "microturn.snapshotClaim" -}}
{{- .Values.snapshots.existingClaim | default (printf "%s-snapshots" (include "microturn.name" .)) -}}
{{- end -}}

{{/* A setting as text: Helm reads every number as a float, and would write large ones with an exponent. */}}
{{- define "microturn.settingValue" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{- int64 . -}}{{- else -}}{{- . -}}{{- end -}}
{{- end -}}
