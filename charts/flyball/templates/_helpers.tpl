{{- /* Of the Deployment, the Service, the Lease and, unless it is named, the account. */}}
{{- define "flyball.fullname" -}}
{{- $name := printf "%s-%s" .Release.Name (.Values.nameOverride | default "operator") -}}
{{ .Values.fullnameOverride | default $name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "flyball.serviceAccountName" -}}
{{- with .Values.serviceAccount -}}
{{- if .create -}}
{{ .name | default (include "flyball.fullname" $) }}
{{- else -}}
{{ required "serviceAccount.create is false, so serviceAccount.name must name an account that exists" .name }}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "flyball.selectorLabels" -}}
app.kubernetes.io/name: flyball
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "flyball.labels" -}}
{{ include "flyball.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "flyball.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{/* The labels of the operator's pods: podLabels may add to ours and replace none. */}}
{{- define "flyball.podLabels" -}}
{{ merge (include "flyball.labels" . | fromYaml) .Values.podLabels | toYaml }}
{{- end }}
