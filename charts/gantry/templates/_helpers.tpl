{{/* Name of the operator's objects: the release, and "operator" so that it reads well in `kubectl get pods`. */}}
{{- define "gantry.fullname" -}}
{{- .Values.fullnameOverride | default (printf "%s-operator" .Release.Name) | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "gantry.selectorLabels" -}}
app.kubernetes.io/name: gantry-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "gantry.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "gantry.selectorLabels" . }}
{{- end -}}

{{- define "gantry.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "gantry.fullname" .) -}}
{{- end -}}

{{/* An image reference from {repository, tag}: (list $ .Values.image) */}}
{{- define "gantry.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{- printf "%s:%s" $image.repository ($image.tag | default $root.Chart.AppVersion) -}}
{{- end -}}
