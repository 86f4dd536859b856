{{/*
What the operator may do where it serves LLMDeployments. It only ever creates Secrets: it cannot read, change or delete one.
get, create and patch together are server-side apply that first looks whether something else has the name.
*/}}
{{- define "flyball.rules" -}}
{{- $child := "[get, list, watch, create, patch, delete]" -}}
- apiGroups: [flyball.dev]
  resources: [llmdeployments]
  verbs: [list, watch]
- apiGroups: [flyball.dev]
  resources: [llmdeployments/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: {{ $child }}
- apiGroups: [""]
  resources: [services, configmaps, persistentvolumeclaims]
  verbs: {{ $child }}
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: {{ $child }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: {{ $child }}
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: {{ $child }}
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: {{ $child }}
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: {{ $child }}
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end }}
